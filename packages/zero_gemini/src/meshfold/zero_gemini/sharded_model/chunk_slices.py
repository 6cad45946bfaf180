"""Elements of parameters that each rank stores as slices of its chunks: read, gathered from all ranks, cut for writing."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from functools import partial

import torch
from torch import Tensor

from meshfold.mesh import all_gather, all_reduce
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.errors import Faults
from meshfold.zero_gemini.optimizer import Entry, Stepper


class ChunkSlices:
    """See :class:`meshfold.zero_gemini.optimizer.interface.StoredParts`.

    Attributes:
        chunk_of: the chunk of each parameter.
        shapes: of this rank's blocks over the tensor axes, in order of registration.
        trained: chunks of the stepper.
        stepper: stores master weights and state; None: there are only the chunks.
        device: where blocks are assembled.
    """

    def __init__(
        self,
        chunk_of: Mapping[str, Chunk],
        shapes: Mapping[str, torch.Size],
        trained: Container[Chunk],
        stepper: Stepper | None,
        device: torch.device,
        faults: Faults,
    ) -> None:
        """Args:
        chunk_of: the chunk of each parameter; it may grow later, and so may ``trained``.
        shapes: of this rank's blocks over the tensor axes.
        trained: chunks of the stepper.
        stepper: stores master weights and state.
        device: where blocks are assembled.
        faults: records reads that failed on this rank; their values are NaN on all ranks (0 for integers).
        """
        self.chunk_of, self.shapes, self.trained = chunk_of, shapes, trained
        self.stepper, self.device, self._faults = stepper, device, faults

    def stepper_of(self, name: str) -> Stepper | None:
        """Return the stepper that holds a parameter's master weights; None if the chunk itself does."""
        return self.stepper if self.chunk_of[name] in self.trained else None

    def kept(self, name: str) -> range:
        mine = next((part for part in self.chunk_of[name].slices if part.name == name), None)
        return range(0) if mine is None else range(mine.parameter_start, mine.parameter_start + mine.length)

    def gather_master(self, name: str) -> Tensor:
        stepper, chunk = self.stepper_of(name), self.chunk_of[name]
        dtype = chunk.dtype if stepper is None else stepper.master_dtype(chunk)
        length = len(self.kept(name))
        if not length:
            values = torch.zeros(0, dtype=dtype, device=self.device)
        elif stepper is not None:
            values = self._attempted(partial(stepper.master, name), length, dtype)
        else:
            begin, end = chunk.span(name)
            values = chunk.shard[begin:end]
        return self._joined(name, values)

    def gather_state(self, name: str, key: str, entry: Entry) -> Tensor:
        stepper, chunk, dtype = self.stepper_of(name), self.chunk_of[name], getattr(torch, entry.dtype)
        value = None
        if stepper is not None and stepper.optimizer_parameter(name) is not None:
            length = len(self.kept(name)) if entry.like else 1
            value = self._attempted(partial(stepper.read, name, key), length, dtype)
        if entry.like:
            return self._joined(name, torch.zeros(0, dtype=dtype) if value is None else value)
        number = torch.tensor(-math.inf) if value is None else value.detach().reshape(())
        return all_reduce(number.to(self.device, torch.float64), chunk.group, "max").to("cpu", dtype)

    def part_to_write(self, name: str, value: Tensor) -> Tensor:
        is_like = value.dim() > 0 and value.shape == self.shapes[name]
        return self.chunk_of[name].cut(name, value) if is_like else value

    def _attempted(self, read: Callable[[], Tensor], length: int, dtype: torch.dtype) -> Tensor:
        """Read on this rank. After an error return a tensor of that length: the other ranks wait in a collective."""
        found: list[Tensor] = []
        if not self._faults.keep(lambda: found.append(read())):
            found = [torch.full((length,), torch.nan if dtype.is_floating_point else 0, dtype=dtype)]
        return found[0]

    def _joined(self, name: str, values: Tensor) -> Tensor:
        """Gather a parameter's elements from the ranks of its chunk's group, and return them in its shape."""
        chunk = self.chunk_of[name]
        lengths = chunk.lengths(name)
        padded = torch.zeros(max(lengths), dtype=values.dtype, device=self.device)
        padded[: values.numel()] = values
        rows = all_gather(padded[None], chunk.group, 0)
        whole = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
        return whole.view(self.shapes[name])
