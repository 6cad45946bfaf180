"""Hooks by which a strategy of Lightning writes and reads checkpoints of a module on the mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from meshfold.checkpoint.folder import remove_checkpoint
from meshfold.engine import TrainingError
from meshfold.lightning.checkpoints import (
    is_folder,
    load_module,
    load_optimizers,
    read_folder,
    whole_optimizer_state,
    write_folder,
)
from meshfold.lightning.session import Session
from meshfold.lightning.strategy_processes import ProcessStrategy
from meshfold.mesh.parameters import RefusingParameter

SESSION = "_meshfold_session"
"""Attribute of a module that keeps its session."""


class CheckpointStrategy(ProcessStrategy):
    """Writer and reader of checkpoints of a module on the mesh.

    Attributes:
        session: the state kept for the module; None before setup.
    """

    _checkpoints: str = "folder"

    @property
    def session(self) -> Session | None:
        """The state kept for the module; None before setup."""
        found: Session | None = getattr(self.lightning_module, SESSION, None)
        return found

    @property
    def _on_mesh(self) -> Session:
        if self.session is None:
            raise TrainingError("the module is not set up yet: the trainer does so when fit, validate or test begins")
        return self.session

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: each rank reads its own blocks, so it must know them."""
        return True

    def full_state_dict(self, rank_zero_only: bool = False) -> dict[str, Tensor]:
        """Return the whole module's state dict in CPU memory, with float32 masters; all ranks must call.

        Args:
            rank_zero_only: only rank 0 gets it, the others an empty dict.
        """
        return self._on_mesh.state.full(keep=self.is_global_zero or not rank_zero_only)

    def lightning_module_state_dict(self, rank_zero_only: bool | None = None) -> dict[str, Any]:
        """Return the value of ``checkpoint["state_dict"]``.

        Args:
            rank_zero_only: True: the whole state on rank 0; False: on every rank. None, as Lightning calls it: the whole state
                on rank 0 for checkpoints in files; for folders this rank's own blocks, which are written directly.
        """
        if rank_zero_only is None and self._checkpoints == "folder":
            own = self._on_mesh.module.state_dict(keep_vars=True)
            return {name: value.detach() if _can_be_read(value) else value for name, value in own.items()}
        return self.full_state_dict(rank_zero_only=rank_zero_only is not False)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of an optimizer in torch's form on rank 0; for folders nothing."""
        unit = self._on_mesh.units.of(optimizer)
        if unit is None:
            return dict(super().optimizer_state(optimizer))
        return {} if self._checkpoints == "folder" else whole_optimizer_state(self._on_mesh, unit)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; all ranks must call.

        Raises:
            CheckpointError: on all ranks, if a folder could not be written.
        """
        checkpoint["meshfold_micro_step"] = self._on_mesh.steps
        if self._checkpoints == "file":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(
                "storage_options go with MeshfoldStrategy(checkpoints='file'): folders are written by all ranks"
            )
        write_folder(filepath, self._on_mesh, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the contents of a checkpoint, folder or file, of any strategy and any number of ranks."""
        path: str | os.PathLike[str] = checkpoint_path
        if is_folder(path):
            return read_folder(path, weights_only=weights_only)
        return dict(super().load_checkpoint(checkpoint_path, weights_only=weights_only))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint; of a folder only the checkpoint's files. Done by rank 0."""
        if not is_folder(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            remove_checkpoint(Path(filepath))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state, each rank its own blocks.

        Raises:
            CheckpointError: for another module's.
        """
        session = self._on_mesh
        load_module(session, checkpoint["state_dict"], strict=strict)
        session.steps = int(checkpoint.get("meshfold_micro_step", checkpoint.get("global_step", 0)))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' state, each rank its own blocks.

        Raises:
            CheckpointError: for the state of others.
        """
        load_optimizers(self._on_mesh, checkpoint["optimizer_states"])


def _can_be_read(value: object) -> bool:
    """Return True for a tensor that has its values now: no parameter that ZeRO stage 3 has released."""
    return isinstance(value, Tensor) and not isinstance(value, RefusingParameter)
