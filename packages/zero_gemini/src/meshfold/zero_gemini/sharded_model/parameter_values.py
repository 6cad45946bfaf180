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
    """The part of :class:`~meshfold.zero_gemini.gemini.Gemini` that checkpoints use: reads and writes by parameter."""

    _names: dict[Tensor, str]
    _chunk_of: dict[str, Chunk]
    _gradients: dict[Chunk, ChunkGradient]
    _contents: Contents
    _residents: Residents
    _stepper: Stepper | None
    _faults: Faults

    @abstractmethod
    def flush(self) -> None:
        """Finish every pending step."""

    def holds(self, parameter: Tensor) -> bool:
        """Return True if a tensor is one of the parameters in chunks."""
        return parameter in self._names

    def read(self, parameter: Tensor) -> Tensor:
        """Return this rank's block over the tensor axes of a parameter's master weights. Collective over its chunk's group.

        Values that a rank cannot read from its disk are NaN, and :meth:`check` and :meth:`agree` then raise.
        """
        self.flush()
        return self._contents.read(self._name_of(parameter))

    def check(self) -> None:
        """Raise the error of a read or write that failed on this rank since the last :meth:`agree`.

        A failed read returned NaN, so that a reader of many tensors completes all collectives before it tells the other ranks.
        """
        self._faults.check_own()

    def agree(self) -> None:
        """Raise on all ranks if a read or write failed on any of them. All ranks must call."""
        self._faults.agree()

    def master_dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of a parameter's master weights."""
        return self._contents.master_dtype(self._name_of(parameter))

    def write(self, parameter: Tensor, block: Tensor) -> None:
        """Set a parameter's master weights from this rank's block over the tensor axes. Call ``publish`` afterwards."""
        self.flush()
        self._faults.keep(partial(self._contents.fill, self._name_of(parameter), block))

    def take_written(self, parameter: Tensor | None = None) -> None:
        """Take what a user's own code wrote to resident parameters into their master weights; call it before a step or a read.

        No communication: every rank takes its own elements. ``parameter``: look only at its chunk.
        """
        for chunk in self._gradients if parameter is None else [self._chunk_of[self._name_of(parameter)]]:
            for name, parameter in chunk.written().items():
                self._faults.keep(partial(self._contents.take_written, name, parameter))

    def state_entries(self) -> dict[str, dict[str, Entry]]:
        """Return the entries of the optimizer's tensors, by parameter name and key. All ranks of the chunks' groups must call."""
        self.flush()
        return self._contents.state_entries()

    def read_state(self, name: str, key: str, entry: Entry) -> Tensor:
        """Return this rank's block of an optimizer tensor over the tensor axes, or a number. Collective over the chunk's group."""
        return self._contents.read_state(name, key, entry)

    def kept(self, parameter: Tensor) -> range:
        """Return the range of elements of a parameter's block, in row-major order, that this rank of the chunk's group stores."""
        return self._contents.kept(self._name_of(parameter))

    def filled(self, parameter: Tensor) -> range:
        """Return the range of elements of a parameter's block, in row-major order, that :meth:`write` reads."""
        return self._contents.filled(self._name_of(parameter))

    def parts(self, parameter: Tensor, key: str | None = None) -> StoredValue:
        """Return the elements of :meth:`kept`, of a parameter's master weights or of an optimizer tensor, flat as in memory.

        A number is returned unchanged. Call ``flush`` before; there is no communication. The next step changes the result, and
        ``move`` makes it invalid. State on disk is read.

        Raises:
            DiskError: if they cannot be read.
        """
        return self._contents.parts(self._name_of(parameter), key)

    def noted_parts(self) -> Callable[[Tensor, str | None], StoredValue] | None:
        """Return a snapshot of :meth:`parts` that any thread may call until the next step or ``move``. All ranks must call.

        None for state on disk, and for optimizers other than Adam.
        """
        self.flush()
        found = self._contents.snapshot()
        return None if found is None else lambda parameter, key: found(self._name_of(parameter), key)

    def axes_over(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the axes whose ranks share a parameter's chunk."""
        return self._chunk_of[self._name_of(parameter)].group.axes

    def is_on_disk(self, parameter: Tensor, key: str | None = None) -> bool:
        """Return True if a part of a parameter's master weights, or of one of its optimizer tensors, is on disk."""
        chunk = self._chunk_of[self._name_of(parameter)]
        if chunk not in self._gradients or self._residents.placements[chunk].state != "disk":
            return False
        # Neither compute weights nor step counts are ever on disk.
        return chunk.dtype != self.master_dtype(parameter) if key is None else key != "step"

    def clear_state(self) -> None:
        """Reset the optimizer's state to that before the first step."""
        self.flush()
        if self._stepper is not None:
            self._faults.keep(self._stepper.reset)

    def write_state(self, name: str, key: str, value: Tensor) -> None:
        """Set an optimizer tensor: this rank's block over the tensor axes, or a number."""
        self.flush()
        self._faults.keep(partial(self._contents.write_state, name, key, value))

    def _name_of(self, parameter: Tensor) -> str:
        return self._names[parameter]
