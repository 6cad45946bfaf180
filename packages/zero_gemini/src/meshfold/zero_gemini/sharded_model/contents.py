"""Contents of a model's chunks by parameter: master weights and optimizer state, read whole and written."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from functools import partial

import torch
from torch import Tensor

from meshfold.mesh import Group, all_gather, all_reduce
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.parameters import StoredValue
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.errors import Faults
from meshfold.zero_gemini.optimizer import Entry, Stepper
from meshfold.zero_gemini.optimizer.state_tree import AdamSnapshot
from meshfold.zero_gemini.optimizer.whole_parameter import WholeStepper


class Contents:
    """Reads and writes values by parameter name. No step and no backward may be running."""

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
        shapes: of this rank's blocks over the tensor axes, in order of registration.
        trained: chunks of the stepper.
        stepper: stores master weights and state.
        device: where blocks are assembled.
        faults: records reads that failed on this rank; their values are NaN on all ranks (0 for integers).
        """
        self._chunk_of, self._shapes, self._trained = chunk_of, shapes, trained
        self._stepper, self._device, self._faults = stepper, device, faults

    def _stepper_of(self, name: str) -> Stepper | None:
        """Return the stepper that holds a parameter's master weights; None if the chunk itself does."""
        return self._stepper if self._chunk_of[name] in self._trained else None

    # -- master weights -------------------------------------------------------------------------------------------

    def fill(self, name: str, block: Tensor) -> None:
        """Set a parameter's master weights; this rank stores its shard."""
        stepper = self._stepper_of(name)
        if stepper is None:
            self._chunk_of[name].fill(name, block)
        else:
            stepper.fill(name, block)

    def read(self, name: str) -> Tensor:
        """Return this rank's block over the tensor axes of a parameter's master weights. Collective over its chunk's group."""
        stepper, chunk = self._stepper_of(name), self._chunk_of[name]
        if isinstance(stepper, WholeStepper):
            return stepper.gather_master(name)
        mine = next((part for part in chunk.slices if part.name == name), None)
        if mine is None:
            values = torch.zeros(0, dtype=self.master_dtype(name), device=self._device)
        elif stepper is not None:
            values = self._attempted(partial(stepper.master, name), mine.length, self.master_dtype(name))
        else:
            values = chunk.shard[mine.shard_start : mine.shard_start + mine.length]
        return self._joined(name, values)

    def kept(self, name: str) -> range:
        """Return the range of flat elements that this rank stores, of the master weights and of state of the same shape."""
        stepper, chunk = self._stepper_of(name), self._chunk_of[name]
        if isinstance(stepper, WholeStepper):
            return range(self._shapes[name].numel() if stepper.owns(name) else 0)
        mine = next((part for part in chunk.slices if part.name == name), None)
        return range(0) if mine is None else range(mine.parameter_start, mine.parameter_start + mine.length)

    def parts(self, name: str, key: str | None = None) -> StoredValue:
        """Return the elements of :meth:`kept`, of the master weights or of an optimizer tensor, flat as in memory.

        An optimizer tensor of another shape is returned whole. Empty if this rank stores none. No communication.
        """
        return self._parts(name, key, self._stepper)

    def snapshot(self) -> Callable[[str, str | None], StoredValue] | None:
        """Return a snapshot of :meth:`parts` for any thread, valid until the next step or move; None if not possible."""
        taken = None if self._stepper is None else self._stepper.snapshot()
        return None if taken is None else lambda name, key: self._parts(name, key, taken)

    def _parts(self, name: str, key: str | None, state: Stepper | AdamSnapshot | None) -> StoredValue:
        if not self.kept(name):
            return StoredValue(())
        if state is not None and self._stepper_of(name) is not None:
            return state.parts(name, key)
        chunk = self._chunk_of[name]
        begin, end = chunk.span(name)
        return StoredValue((chunk.shard[begin:end],))

    def master_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter's master weights."""
        stepper, chunk = self._stepper_of(name), self._chunk_of[name]
        return chunk.dtype if stepper is None else stepper.master_dtype(chunk)

    # -- the optimizer's state ----------------------------------------------------------------------------------

    def state_entries(self) -> dict[str, dict[str, Entry]]:
        """Return the entries of the optimizer's tensors, by parameter name and key. All ranks of the chunks' groups must call."""
        found: dict[str, dict[str, Entry]] = {}
        if self._stepper is None:
            return found
        mine: dict[tuple[int, ...], tuple[Group, dict[str, dict[str, Entry]]]] = {}  # by group
        for chunk in dict.fromkeys(self._chunk_of.values()):
            if chunk in self._trained:
                _, entries_of = mine.setdefault(chunk.group.ranks, (chunk.group, {}))
                entries_of.update(self._stepper.entries(chunk))
        for group, entries_of in mine.values():
            for described in all_gather_object(entries_of, group, self._device):
                for name, entries in described.items():
                    found.setdefault(name, {}).update({key: Entry(*entry) for key, entry in entries.items()})
        return {name: dict(sorted(found[name].items())) for name in self._shapes if found.get(name)}

    def read_state(self, name: str, key: str, entry: Entry) -> Tensor:
        """Return this rank's block of an optimizer tensor over the tensor axes, or a number. Collective over the chunk's group."""
        stepper, chunk, dtype = self._stepper, self._chunk_of[name], getattr(torch, entry.dtype)
        if isinstance(stepper, WholeStepper):
            return stepper.gather_state(name, key, entry)
        value = None
        if stepper is not None and stepper.optimizer_parameter(name) is not None:
            mine = next(part for part in chunk.slices if part.name == name)
            value = self._attempted(partial(stepper.read, name, key), mine.length if entry.like else 1, dtype)
        if entry.like:
            return self._joined(name, torch.zeros(0, dtype=dtype) if value is None else value)
        number = torch.tensor(-math.inf) if value is None else value.detach().reshape(())
        return all_reduce(number.to(self._device, torch.float64), chunk.group, "max").to("cpu", dtype)

    def write_state(self, name: str, key: str, value: Tensor) -> None:
        """Set an optimizer tensor: this rank's block over the tensor axes, or a number."""
        if self._stepper is None or self._stepper.optimizer_parameter(name) is None:
            return
        whole = isinstance(self._stepper, WholeStepper)
        like = not whole and value.dim() > 0 and value.shape == self._shapes[name]
        self._stepper.write(name, key, self._chunk_of[name].cut(name, value) if like else value)

    def _attempted(self, read: Callable[[], Tensor], length: int, dtype: torch.dtype) -> Tensor:
        """Read on this rank. After an error, return a tensor of the same length, because the other ranks wait in a collective."""
        found: list[Tensor] = []
        if not self._faults.keep(lambda: found.append(read())):
            found = [torch.full((length,), torch.nan if dtype.is_floating_point else 0, dtype=dtype)]
        return found[0]

    def _joined(self, name: str, values: Tensor) -> Tensor:
        """Gather a parameter's elements from the ranks of its chunk's group, and return them in its shape."""
        chunk = self._chunk_of[name]
        lengths = chunk.lengths(name)
        padded = torch.zeros(max(lengths), dtype=values.dtype, device=self._device)
        padded[: values.numel()] = values
        rows = all_gather(padded[None], chunk.group, 0)
        whole = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
        return whole.view(self._shapes[name])
