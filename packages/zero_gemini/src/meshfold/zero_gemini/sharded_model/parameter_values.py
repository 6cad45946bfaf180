"""Values of a model in chunks by parameter: master weights and optimizer state, read and written between steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from meshfold.mesh.parameters import StoredValue
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.gradient import ChunkGradient
from meshfold.zero_gemini.errors import Faults
from meshfold.zero_gemini.optimizer import Entry, Stepper
from meshfold.zero_gemini.sharded_model.contents import Contents
from meshfold.zero_gemini.sharded_model.moves import Residents


class ParameterValues(ABC):
    """The part of :class:`~meshfold.zero_gemini.gemini.Gemini` that checkpoints are made of."""

    _names: dict[Tensor, str]
    _chunk_of: dict[str, Chunk]
    _gradients: dict[Chunk, ChunkGradient]
    _contents: Contents
    _residents: Residents
    _stepper: Stepper | None
    _faults: Faults

    @abstractmethod
    def flush(self) -> None:
        """Let every step that was only promised be done."""

    def holds(self, parameter: Tensor) -> bool:
        """Return whether a tensor is one of the parameters that lie in chunks."""
        return parameter in self._names

    def read(self, parameter: Tensor) -> Tensor:
        """This rank's block over the tensor axes of a parameter's master weights. All ranks of its chunk's group must call.

        What a rank cannot read from its disk is NaN, and :meth:`check` and :meth:`agree` raise then.
        """
        self.flush()
        return self._contents.read(self._name_of(parameter))

    def check(self) -> None:
        """Raise what could not be read or written on this rank since all agreed; in its place NaN was read.

        Readers of many tensors go through the collectives of all, and let the other ranks know then.
        """
        self._faults.check_own()

    def agree(self) -> None:
        """Raise on all ranks what could not be read or written on any. All ranks must call."""
        self._faults.agree()

    def master_dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of a parameter's master weights."""
        return self._contents.master_dtype(self._name_of(parameter))

    def write(self, parameter: Tensor, block: Tensor) -> None:
        """Take a parameter's master weights, this rank's block over the tensor axes; then ``publish``."""
        self.flush()
        self._faults.keep(partial(self._contents.fill, self._name_of(parameter), block))

    def state_entries(self) -> dict[str, dict[str, Entry]]:
        """Return the entries of the optimizer's tensors, by parameter name and key. All ranks of the chunks' groups must call."""
        self.flush()
        return self._contents.state_entries()

    def read_state(self, name: str, key: str, entry: Entry) -> Tensor:
        """This rank's block over the tensor axes of an optimizer's tensor; a number as it is. The chunk's group must call."""
        return self._contents.read_state(name, key, entry)

    def kept(self, parameter: Tensor) -> range:
        """Return the elements of its block that only this rank of the chunk's group keeps, row by row."""
        return self._contents.kept(self._name_of(parameter))

    def parts(self, parameter: Tensor, key: str | None = None) -> StoredValue:
        """These elements of a parameter's master weights, or of an optimizer's tensor, flat and as they lie in memory.

        A number as it is. After ``flush``, no communication. They change with the next step, and mean nothing after
        ``move``; what lives on disk was read.

        Raises:
            DiskError: if they cannot be read.
        """
        return self._contents.parts(self._name_of(parameter), key)

    def noted_parts(self) -> Callable[[Tensor, str | None], StoredValue] | None:
        """:meth:`parts` as they are now, to be asked for later and in any thread, until the next step or ``move``.

        None where that cannot be: of state on a disk, and of other optimizers than Adam. All ranks must call.
        """
        self.flush()
        found = self._contents.snapshot()
        return None if found is None else lambda parameter, key: found(self._name_of(parameter), key)

    def axes_over(self, parameter: Tensor) -> tuple[str, ...]:
        """The axes whose ranks share a parameter's chunk."""
        return self._chunk_of[self._name_of(parameter)].group.axes

    def is_on_disk(self, parameter: Tensor, key: str | None = None) -> bool:
        """Return whether some of a parameter's master weights, or of one of the optimizer's tensors of it, lives on disk."""
        chunk = self._chunk_of[self._name_of(parameter)]
        if chunk not in self._gradients or self._residents.placements[chunk].state != "disk":
            return False
        # What the model computes with never does, and how often it was stepped is a number.
        return chunk.dtype != self.master_dtype(parameter) if key is None else key != "step"

    def clear_state(self) -> None:
        """Forget the optimizer's state, as if it had not stepped yet."""
        self.flush()
        if self._stepper is not None:
            self._faults.keep(self._stepper.reset)

    def write_state(self, name: str, key: str, value: Tensor) -> None:
        """Take an optimizer's tensor: this rank's block over the tensor axes, or a number."""
        self.flush()
        self._faults.keep(partial(self._contents.write_state, name, key, value))

    def _name_of(self, parameter: Tensor) -> str:
        return self._names[parameter]
