"""Contents of a model's chunks by parameter: master weights and optimizer state, read whole and written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshfold.mesh import Group
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.parameters import StoredValue, with_written
from meshfold.zero_gemini.optimizer import Entry, Stepper
from meshfold.zero_gemini.optimizer.interface import StoredParts
from meshfold.zero_gemini.optimizer.state_tree import AdamSnapshot
from meshfold.zero_gemini.sharded_model.chunk_slices import ChunkSlices


class Contents:
    """Reads and writes values by parameter name. No step and no backward may be running."""

    def __init__(self, slices: ChunkSlices) -> None:
        """``slices``: knows the chunks and the stepper."""
        self._slices = slices
        self._chunk_of, self._shapes, self._trained = slices.chunk_of, slices.shapes, slices.trained
        self._stepper, self._device = slices.stepper, slices.device

    def _stored(self, name: str) -> StoredParts:
        """Return the object that knows which elements of a parameter this rank stores."""
        stepper = self._slices.stepper_of(name)
        return self._slices if stepper is None else stepper.stored_parts or self._slices

    # -- master weights -------------------------------------------------------------------------------------------

    def fill(self, name: str, block: Tensor) -> None:
        """Set a parameter's master weights; this rank stores its shard."""
        stepper = self._slices.stepper_of(name)
        if stepper is None:
            self._chunk_of[name].fill(name, block)
        else:
            stepper.fill(name, block)

    @torch.no_grad()
    def take_written(self, name: str, parameter: Tensor) -> None:
        """Set master weights to what a parameter of a resident chunk has now; those that still round to it stay."""
        stepper, kept = self._slices.stepper_of(name), self.kept(name)
        if stepper is None:  # the parameter is the weight
            return
        block = parameter.detach()
        if kept:
            mine = block.reshape(-1)[kept.start : kept.stop]
            found = with_written(stepper.master(name).reshape(-1), mine)
            if found is None:
                return
            block = block.to(found.dtype, copy=True)
            block.view(-1)[kept.start : kept.stop] = found.to(block.device)
        stepper.fill(name, block)

    def read(self, name: str) -> Tensor:
        """Return this rank's block over the tensor axes of a parameter's master weights. Collective over its chunk's group."""
        return self._stored(name).gather_master(name)

    def kept(self, name: str) -> range:
        """Return the range of flat elements that this rank stores, of the master weights and of state of the same shape."""
        return self._stored(name).kept(name)

    def filled(self, name: str) -> range:
        """Return the range of flat elements that :meth:`fill` reads: this rank's shard, and what the optimizer keeps."""
        both = [one for one in (self._slices.kept(name), self.kept(name)) if one]
        return range(min(one.start for one in both), max(one.stop for one in both)) if both else range(0)

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
        if state is not None and self._slices.stepper_of(name) is not None:
            return state.parts(name, key)
        chunk = self._chunk_of[name]
        begin, end = chunk.span(name)
        return StoredValue((chunk.shard[begin:end],))

    def master_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter's master weights."""
        stepper, chunk = self._slices.stepper_of(name), self._chunk_of[name]
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
        return self._stored(name).gather_state(name, key, entry)

    def write_state(self, name: str, key: str, value: Tensor) -> None:
        """Set an optimizer tensor: this rank's block over the tensor axes, or a number."""
        if self._stepper is None or self._stepper.optimizer_parameter(name) is None:
            return
        self._stepper.write(name, key, self._stored(name).part_to_write(name, value))
