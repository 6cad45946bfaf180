"""The processes of a strategy: connecting them, the mesh over them, and their communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning.pytorch.strategies import DDPStrategy
from meshfold.engine import TrainingError
from meshfold.engine.precision import LossScaler
from meshfold.engine.world import World, join_world
from meshfold.lightning import communication
from meshfold.lightning.environment import environment_of
from meshfold.lightning.precision import MeshfoldPrecision
from meshfold.mesh import ParallelSpec, barrier

T = TypeVar("T")


class ProcessStrategy(DDPStrategy):
    """Ranks of a parallel spec, in place of those of data parallelism alone.

    Attributes:
        world: spec, mesh and device; None before the trainer has connected the processes.
    """

    world: World | None = None
    _parallel: Mapping[str, object] | ParallelSpec
    _seed: int | None

    def setup_distributed(self) -> None:
        """Connect the processes and lay the mesh over them."""
        self.set_world_ranks()
        if self.world is None:
            place = None
            if self.cluster_environment is not None:
                place = environment_of(self.cluster_environment, self.num_processes)
            self.world = join_world(self._parallel, self.root_device, place)
            seed = torch.initial_seed() % 2**62 if self._seed is None else self._seed
            self._seed = communication.broadcast_object(seed, self.world, 0)
            if isinstance(self.precision_plugin, MeshfoldPrecision):
                self.precision_plugin.scaler = LossScaler(
                    self.precision_plugin.engine.scale, says=self.is_global_zero
                )

    @property
    def _world(self) -> World:
        if self.world is None:
            raise TrainingError(
                "the processes are not connected yet: the trainer does so when fit, validate or test begins"
            )
        return self.world

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments that split rows over the data coordinates: ranks along other axes get the same rows."""
        return {"num_replicas": self._world.row_size, "rank": self._world.row_index}

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if self.world is not None:
            barrier(self.world.everyone, self.world.device)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return one rank's object on all ranks."""
        return obj if self.world is None else communication.broadcast_object(obj, self.world, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor's mean (or sum, max, min) over the data coordinates, each counted once; equal on every rank.

        Args:
            tensor: what is no tensor is returned as it is.
            group: axes of the mesh to go over in place of the data axes, such as ``"tensor"`` or ``("row", "col")``.
            reduce_op: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, or what torch calls them.
        """
        if not isinstance(tensor, Tensor) or self.world is None:
            return tensor
        return communication.reduce_over(tensor, self.world, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return ``... -> d ...``: the tensor of each data coordinate; the tensor itself if there is only one.

        Args:
            tensor: of one shape on all ranks.
            group: as for :meth:`reduce`.
            sync_grads: let gradients come back, summed over the ranks.
        """
        return (
            tensor
            if self.world is None
            else communication.gather_from(tensor, self.world, group, sync_grads=sync_grads)
        )

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks decide so, or any."""
        if self.world is None:
            return decision
        said = torch.tensor(int(decision), device=self.world.device)
        return bool(communication.reduce_over(said, self.world, self.world.everyone, "min" if all else "max"))
