"""Optimizers that need whole matrices (such as Adafactor, Muon and Shampoo): each parameter has an owner.

A step sends gradients from shards to owners, steps whole parameters there with torch's own optimizer, and sends the new weights
back to shards. :mod:`meshfold.zero_gemini.optimizer.parameter_owners` says what is sent. With N ranks each keeps 1/N of the master
weights and of the optimizer's state, give or take a parameter or two. During a step it also holds 1/N of the gradient in the master
weights' dtype. Every matrix is stepped as one process would step it, to the bit.

None of this overlaps with compute, and state stays in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import ParameterMeta, broadcast
from meshfold.mesh.parameters import StoredValue, tensors_of_state
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.memory.arena import Block, MemoryTier
from meshfold.zero_gemini.optimizer import state_tree as paths
from meshfold.zero_gemini.optimizer.interface import Entry, StepsAtOnce, StoredParts
from meshfold.zero_gemini.optimizer.parameter_owners import Owners, rounds_of
from meshfold.zero_gemini.optimizer.state_tree import STATE, CountedState


class WholeStepper(StepsAtOnce):
    """See :class:`meshfold.zero_gemini.optimizer.interface.Stepper`; the optimizer has the whole parameters that this rank owns.

    The optimizer steps all parameters in one call, so their gradients are held until then, even without clipping.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype | None,
        *,
        metas: Mapping[str, ParameterMeta],
        shapes: Mapping[str, torch.Size],
        with_state: bool = False,
    ) -> None:
        """Args:
        optimizer: its groups get the parameters that this rank owns.
        dtype: of the master weights; None: as the model computes.
        metas: placement of each trained parameter.
        shapes: of each, on this rank.
        with_state: the optimizer makes its state at construction.

        Raises:
            MemoryPlanError: for a parameter split by tensor axes, if the optimizer has no ``blocks`` to get the rest from.
        """
        for name, meta in metas.items():
            if hasattr(optimizer, "blocks"):  # one of ours, which requests whole-tensor sums itself
                _check_block(optimizer, name, shapes[name], meta)
                continue
            _refuse_split(type(optimizer).__name__, name, meta, shapes[name])
        self.optimizer, self._dtype, self._made_with_state = optimizer, dtype, with_state
        self._shapes = dict(shapes)
        self._choice = Owners()
        self._owners: dict[str, int] = {}
        self._chunks: dict[str, Chunk] = {}
        self._places: dict[Chunk, MemoryTier] = {}  # in the order of adoption
        self._blocks: dict[Chunk, Block] = {}
        self._counted = CountedState(self._tensors_of, self._places)
        self._in_shard: set[Chunk] = set()  # chunks whose shard is also the master weights
        self._loaded: dict[str, dict[str, Tensor]] = {}  # written by `write`, by parameter and key
        self._weights: dict[str, nn.Parameter] = {}

    # -- chunks ---------------------------------------------------------------------------------------------------

    def reserve(self, shards: Iterable[tuple[torch.dtype, int]]) -> None:
        """Refuse state on disk, where it is in pieces that know no matrices.

        Raises:
            MemoryPlanError: for any chunk.
        """
        if any(True for _ in shards):
            self._refuse_disk()

    def adopt(self, chunk: Chunk, place: MemoryTier) -> None:
        self._owners.update(self._choice.choose(chunk.spec, chunk.group.ranks))
        self._chunks.update(dict.fromkeys(chunk.spec.names, chunk))
        self._place(chunk, place)

    def move(self, chunk: Chunk, placement: ChunkPlacement) -> None:
        was = chunk.tier
        try:
            chunk.move(placement.parameters)
            self._place(chunk, placement.state)
        except BaseException:
            if chunk.tier != was:
                chunk.move(was)
            if chunk in self._in_shard:
                self._point(self._views(chunk, chunk.shard))
            raise

    def _count_state(self) -> None:
        self._counted.update()

    @torch.no_grad()
    def _place(self, chunk: Chunk, place: MemoryTier) -> None:
        """Move a chunk's owned weights and their optimizer state to a tier."""
        if place == "disk":
            self._refuse_disk()
        dtype, arena = self.master_dtype(chunk), chunk.memory.arena(place)
        shown = "device" if chunk.resident else chunk.tier
        in_shard = chunk.group.size == 1 and dtype == chunk.dtype and place == shown  # no separate weights are needed
        size = sum(self._shapes[name].numel() for name in chunk.spec.names if self.owns(name))
        taken: list[Block] = []
        try:
            if size and not in_shard:
                taken.append(arena.allocate(size, dtype, f"weights of {chunk!r}"))
            plane = taken[0].tensor if taken else chunk.shard
            views = self._views(chunk, plane, packed=bool(taken))
            if taken:
                sources = self._views(chunk, chunk.shard) if chunk in self._in_shard else self._weights
                for name, view in views.items():
                    view.copy_(sources[name]) if name in sources else view.zero_()
            weights = [*taken]
            for value, _ in self._counted.missing({chunk: place}):
                taken.append(arena.count(value, STATE))  # reserve memory for state that does not exist yet
        except BaseException:
            for block in taken:
                block.free()
            raise
        self._point(views)
        if chunk in self._blocks:
            self._blocks.pop(chunk).free()
        if weights:
            self._blocks[chunk] = weights[0]
        self._in_shard.discard(chunk)
        if in_shard:
            self._in_shard.add(chunk)
        self._places[chunk] = place
        for block in taken[len(weights) :]:
            block.free()
        self._counted.update()

    def _refuse_disk(self) -> None:
        raise MemoryPlanError(
            f"the state of {type(self.optimizer).__name__} cannot be on disk, since it needs whole matrices: use adamw, another "
            "optimizer of elements, lamb or lars, or leave offload_path out"
        )

    def _views(self, chunk: Chunk, plane: Tensor, *, packed: bool = False) -> dict[str, Tensor]:
        """Return a chunk's owned parameters as views of a flat tensor, at their offsets in the shard or, ``packed``, contiguous."""
        found, end = {}, 0
        starts = {part.name: part.shard_start for part in chunk.slices}
        for name in filter(self.owns, chunk.spec.names):
            shape = self._shapes[name]
            start = end if packed else starts[name]
            end = start + shape.numel()
            found[name] = plane[start:end].view(shape)
        return found

    def _point(self, views: Mapping[str, Tensor]) -> None:
        """Point the parameters at the views, and move their state to the same tier."""
        moved = {}
        for name, view in views.items():
            if name in self._weights:
                old, state = self._weights[name].device, self.optimizer.state.get(self._weights[name])
                if state and old != view.device:
                    moved[name] = {
                        key: value if key == "step" else paths.moved(value, old, view.device)
                        for key, value in state.items()
                    }
        for name, view in views.items():
            if name not in self._weights:
                self._weights[name] = nn.Parameter(view)
            self._weights[name].data = view
            if name in moved:
                self.optimizer.state[self._weights[name]].update(moved[name])

    def owns(self, name: str) -> bool:
        """Return True if this rank has the whole of a parameter."""
        return self._owners[name] == self._chunks[name].group.index

    @property
    def stored_parts(self) -> StoredParts:
        """Return this stepper: each owner stores whole parameters."""
        return self

    def kept(self, name: str) -> range:
        """Return all elements on the rank that owns a parameter, none elsewhere."""
        return range(self._shapes[name].numel() if self.owns(name) else 0)

    def part_to_write(self, name: str, value: Tensor) -> Tensor:
        """Return the value: owners store whole tensors."""
        return value

    def optimizer_parameter(self, name: str) -> nn.Parameter | None:
        return self._weights.get(name)

    # -- values ---------------------------------------------------------------------------------------------------

    def master_dtype(self, chunk: Chunk) -> torch.dtype:
        return self._dtype or chunk.dtype

    @torch.no_grad()
    def fill(self, name: str, block: Tensor) -> None:
        if name in self._weights:
            self._weights[name].copy_(block.view(self._shapes[name]))
        self._chunks[name].fill(name, block)

    def master(self, name: str) -> Tensor:
        """Return a parameter's master weights, flat, on the rank that owns it."""
        return self._weights[name].detach().view(-1)

    def publish(self, chunk: Chunk) -> None:
        chunk.publish()  # a step or `fill` has written the shard

    def gather_master(self, name: str) -> Tensor:
        """Return a parameter's master weights, from its owner. All ranks of its chunk's group must call."""
        chunk = self._chunks[name]
        return self._from_owner(name, self._weights.get(name), self._shapes[name], self.master_dtype(chunk))

    def gather_state(self, name: str, key: str, entry: Entry) -> Tensor:
        """Gather one of the optimizer's tensors, in its shape, from its owner. All ranks of the chunk's group must call.

        Numbers are returned on the CPU.
        """
        shape = self._shapes[name] if entry.like else torch.Size(entry.shape)
        value = self._leaves(name)[key] if self.owns(name) else None
        found = self._from_owner(name, value, shape, getattr(torch, entry.dtype))
        return found if found.dim() else found.cpu()

    def _from_owner(self, name: str, value: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        chunk = self._chunks[name]
        if value is None:
            value = torch.empty(shape, dtype=dtype)
        value = value.detach().to(chunk.device)
        if not value.numel():
            return value
        if dtype == torch.bool:
            return broadcast(value.to(torch.uint8), chunk.group, self._owners[name]).bool()
        return broadcast(value, chunk.group, self._owners[name])

    # -- stepping -------------------------------------------------------------------------------------------------

    def step(self, gradients: Mapping[Chunk, Tensor], scale: float | Tensor, used: set[str]) -> None:
        rounds = rounds_of([chunk for chunk in self._places if chunk in gradients], self._owners)
        with torch.no_grad():
            for some in rounds:
                for name, flat in some.to_owners(gradients):
                    if name in used:
                        self._weights[name].grad = self._scaled(name, flat, scale)
        self._loaded.clear()
        self.optimizer.step()
        with torch.no_grad():
            for some in rounds:
                some.to_shards(
                    {
                        name: self._weights[name].detach().view(-1)
                        for chunk in some.chunks
                        for name in chunk.spec.names
                        if name in self._weights
                    }
                )
        for parameter in self._weights.values():
            parameter.grad = None
        self._counted.update()

    def _scaled(self, name: str, flat: Tensor, scale: float | Tensor) -> Tensor:
        parameter = self._weights[name]
        gradient = flat.to(parameter.device, parameter.dtype).view(parameter.shape)
        if isinstance(scale, Tensor):
            return gradient * scale.to(gradient)
        return gradient if scale == 1.0 else gradient * scale

    def close(self) -> None:
        """Release all memory."""
        self.optimizer.state.clear()
        self._counted.update()
        for parameter in self._weights.values():
            parameter.data = parameter.data.new_empty(0)
        for block in self._blocks.values():
            block.free()
        self._blocks.clear()

    # -- state ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.optimizer.state.clear()
        self._loaded.clear()
        self._counted.update()
        self.begin()

    def _tensors_of(self, chunk: Chunk) -> Iterator[Tensor]:
        """Return the optimizer's tensors for a chunk's parameters, without numbers."""
        for name in chunk.spec.names:
            if name in self._weights:
                for value in tensors_of_state(self.optimizer.state.get(self._weights[name], {})):
                    if value.numel() > 1:
                        yield value

    def entries(self, chunk: Chunk) -> dict[str, dict[str, Entry]]:
        found = {}
        for name in chunk.spec.names:
            if not self.owns(name):
                continue
            found[name] = {key: _entry(value, self._shapes[name]) for key, value in self._leaves(name).items()}
        return found

    def _leaves(self, name: str) -> dict[str, Tensor]:
        state: dict[str, Any] = self.optimizer.state.get(self._weights[name], {})
        return paths.flatten(state)

    def read(self, name: str, key: str) -> Tensor:
        """Return one of the optimizer's tensors, in its shape, on the rank that owns the parameter."""
        return self._leaves(name)[key]

    def parts(self, name: str, key: str | None) -> StoredValue:
        """Return one of the optimizer's tensors as in memory, on the rank that owns the parameter."""
        return StoredValue((self.master(name) if key is None else self.read(name, key).detach(),))

    def write(self, name: str, key: str, value: Tensor) -> None:
        """Set one of the optimizer's tensors: the whole tensor, on the rank that owns the parameter; do nothing elsewhere."""
        if name not in self._weights:
            return
        parameter = self._weights[name]
        # torch keeps step counts on the CPU; all else is on the parameter's device.
        placement = torch.device("cpu") if key == "step" else parameter.device
        loaded = self._loaded.setdefault(name, {})  # elements of a list may arrive in any order
        loaded[key] = value.detach().to(placement, copy=True)
        self.optimizer.state[parameter].update(paths.unflatten(loaded))
        self._counted.update()


def _refuse_split(optimizer: str, name: str, meta: ParameterMeta, shape: torch.Size) -> None:
    split = [axis for axis in meta.placement.split_axes if meta.mesh.size(axis) > 1]
    if split:
        raise MemoryPlanError(
            f"{optimizer} needs whole parameters, and {name!r} is split over {', '.join(split)}: use an elementwise optimizer such "
            "as adamw, or leave tensor parallelism out"
        )
    if tuple(shape) != meta.placement.shape:
        raise MemoryPlanError(
            f"{optimizer} needs whole parameters, and {name!r} of shape {meta.placement.shape} is padded with zeros to "
            f"{tuple(shape)}: use an elementwise optimizer such as adamw"
        )


def _check_block(optimizer: torch.optim.Optimizer, name: str, shape: torch.Size, meta: ParameterMeta) -> None:
    """Let the optimizer refuse a block, if it checks blocks."""
    try:
        getattr(optimizer, "check_block", lambda *shapes: None)(shape, meta.placement.shape)
    except ValueError as error:
        raise MemoryPlanError(f"{name!r}: {error}") from error


def _entry(value: Tensor, shape: torch.Size) -> Entry:
    like = value.dim() > 0 and value.shape == shape
    return Entry(like, str(value.dtype).removeprefix("torch."), () if like else tuple(value.shape))
