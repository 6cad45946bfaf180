"""Weights of an engine for an engine of other ranks, which has another spec: each rank sends, and gets, its rectangles.

Ranks tell each other once which rectangles of the whole tensors they would write into a checkpoint (senders) or have in memory
(receivers). Where two of them overlap, one rank sends the overlap to the other. So a receiver gets the bytes of its own part,
once, in the dtype in which it computes. No rank has more of the model than its spec gives it, besides its part of a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshfold.checkpoint.shards import Shard, Window, narrowed, overlap
from meshfold.engine.engine import Engine
from meshfold.engine.states.protocols import Source
from meshfold.engine.world import World
from meshfold.mesh import SpecError, exchange_rows
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.parameters import metadata_on

BUCKET_BYTES = 1 << 28
"""of whole tensors that are sent together"""


class Overlap(NamedTuple):
    """A rectangle that this rank sends to another rank, or gets from it.

    Attributes:
        peer: the other rank.
        place: number of the sender's shard, or of the receiver's window.
        inside: offsets in it, and sizes, in elements, per dim.
    """

    peer: int
    place: int
    inside: Window


@dataclass(frozen=True, kw_only=True)
class Described:
    """A rank's part of a tensor, as the other ranks know it.

    Attributes:
        dtype: of the tensor on that rank.
        shape: of the whole.
        windows: rectangles of the whole.
    """

    dtype: str
    shape: tuple[int, ...]
    windows: tuple[Window, ...]


class WeightTransfer:
    """Sends the weights of one engine to another, whose ranks are others. All ranks of both make one and call.

    Attributes:
        bytes: that this rank sends, or gets, in one transfer.
    """

    def __init__(self, everyone: World, engine: Engine, *, sends: bool, bucket: int = BUCKET_BYTES) -> None:
        """Args:
            everyone: all ranks of the job.
            engine: that this rank has a part of.
            sends: its weights are sent; else it gets the other's.
            bucket: bytes of whole tensors that are sent together.

        Raises:
            SpecError: on all ranks, if the engines have different models.
        """
        self._everyone, self._engine, self._sends = everyone, engine, sends
        self._shards: dict[str, tuple[Shard, ...]] = {}
        mine, ties = (self._sent(), engine.model_state.ties()) if sends else (self._wanted(), {})
        told = all_gather_object([sends, mine, ties], everyone.everyone, everyone.device)
        senders = {rank: _read(parts) for rank, (is_sender, parts, _) in enumerate(told) if is_sender}
        receivers = {rank: _read(parts) for rank, (is_sender, parts, _) in enumerate(told) if not is_sender}
        self._first = {name: first for is_sender, _, each in told if is_sender for name, first in each.items()}
        whole = {name: part for parts in receivers.values() for name, part in parts.items()}
        _check_same({name: part for parts in senders.values() for name, part in parts.items()}, whole, self._first)
        names = sorted(whole)
        self._dtypes: dict[str, torch.dtype] = {name: getattr(torch, whole[name].dtype) for name in names}
        self._buckets = _buckets(
            [(name, math.prod(whole[name].shape) * self._dtypes[name].itemsize) for name in names], bucket
        )
        rank = everyone.mesh.rank
        self._plan = {name: [*self._overlaps(name, rank, senders, receivers)] for name in names}
        self.bytes = sum(self._size(name, one) for name in names for one in self._plan[name])

    @torch.no_grad()
    def run(self) -> None:
        """Send the weights as they are now; all ranks must call."""
        engine = self._engine
        if self._sends:
            engine.states.settle()
            sources = engine.model_state.sources()
            for names in self._buckets:
                self._send(names, sources)
            return
        engine.saver.before_change()
        engine.runner.forward.weights_change()
        tensors = engine.model_state.unique()
        for names in self._buckets:
            self._receive(names, tensors)
        engine.states.publish()

    # -- what ranks have --------------------------------------------------------------------------------------------

    def _sent(self) -> dict[str, list[Any]]:
        """Return what this rank writes into a checkpoint, for the others."""
        found = {}
        for name, source in self._engine.model_state.sources().items():
            self._shards[name] = source.cut().shards(name)
            windows = [(shard.offsets, shard.sizes) for shard in self._shards[name]]
            found[name] = _words(source.dtype, source.shape, windows)
        return found

    def _wanted(self) -> dict[str, list[Any]]:
        """Return what this rank has in memory, for the others."""
        states, mesh = self._engine.states, self._engine.mesh
        return {
            name: _words(
                tensor.dtype,
                metadata_on(tensor, mesh).placement.shape,
                [window for window, _ in states.windows(tensor)],
            )
            for name, tensor in self._engine.model_state.unique().items()
        }

    def _overlaps(
        self,
        name: str,
        rank: int,
        senders: Mapping[int, Mapping[str, Described]],
        receivers: Mapping[int, Mapping[str, Described]],
    ) -> Iterator[Overlap]:
        """Yield what this rank sends or gets of a tensor: for each peer in the order of the sender's windows."""
        known = self._first.get(name, name)
        if self._sends:
            for peer, parts in receivers.items():
                targets = parts[name].windows if name in parts else ()
                for place, window in enumerate(senders[rank][known].windows):
                    for target in targets:
                        found = overlap(window, target)
                        if found is not None:
                            yield Overlap(peer, place, (_minus(found[0], window[0]), found[1]))
        elif name in receivers[rank]:
            for peer, parts in senders.items():
                for window in parts[known].windows:
                    for place, target in enumerate(receivers[rank][name].windows):
                        found = overlap(window, target)
                        if found is not None:
                            yield Overlap(peer, place, (_minus(found[0], target[0]), found[1]))

    # -- a bucket ---------------------------------------------------------------------------------------------------

    def _counts(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of a bucket for each peer."""
        counts = [0] * self._everyone.everyone.size
        for name in names:
            for one in self._plan[name]:
                counts[one.peer] += self._size(name, one)
        return counts

    def _send(self, names: Sequence[str], sources: Mapping[str, Source]) -> None:
        group, device = self._everyone.everyone, self._everyone.device
        rows: list[list[Tensor]] = [[torch.empty(0, dtype=torch.uint8, device=device)] for _ in group.ranks]
        for name in names:
            if self._plan[name]:
                known = self._first.get(name, name)
                value, shards = sources[known].parts().made(), self._shards[known]
                for one in self._plan[name]:
                    part = narrowed(shards[one.place].view(value), *one.inside)
                    part = part.to(device, self._dtypes[name]).contiguous()
                    rows[one.peer].append(part.view(-1).view(torch.uint8))
        counts = self._counts(names)
        exchange_rows(torch.cat([row for each in rows for row in each]), group, counts, [0] * len(counts)).wait()

    def _receive(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        group, device = self._everyone.everyone, self._everyone.device
        counts = self._counts(names)
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        rows = list(exchange_rows(nothing, group, [0] * len(counts), counts).wait().split(counts))
        states, mesh = self._engine.states, self._engine.mesh
        for name in names:
            if not self._plan[name]:
                continue
            tensor, dtype = tensors[name], self._dtypes[name]
            local = [window for _, window in states.windows(tensor)]
            block = torch.zeros(metadata_on(tensor, mesh).placement.local_shape(mesh), dtype=dtype, device=device)
            for one in self._plan[name]:
                row, rows[one.peer] = rows[one.peer].tensor_split([self._size(name, one)])
                place = narrowed(narrowed(block, *local[one.place]), *one.inside)
                place.copy_(row.clone().view(dtype).view(place.shape))  # a copy is aligned to its elements
            states.write_block(tensor, block)

    def _size(self, name: str, one: Overlap) -> int:
        return math.prod(one.inside[1]) * self._dtypes[name].itemsize


def _words(dtype: torch.dtype, shape: Sequence[int], windows: Sequence[Window]) -> list[Any]:
    return [str(dtype).removeprefix("torch."), shape, windows]


def _read(parts: Mapping[str, Any]) -> dict[str, Described]:
    return {
        name: Described(
            dtype=dtype, shape=tuple(shape), windows=tuple((tuple(offsets), tuple(sizes)) for offsets, sizes in windows)
        )
        for name, (dtype, shape, windows) in parts.items()
    }


def _check_same(sent: Mapping[str, Described], wanted: Mapping[str, Described], first: Mapping[str, str]) -> None:
    """Raise a SpecError unless two engines have the same tensors."""
    of_wanted = {first.get(name, name): part.shape for name, part in wanted.items()}
    of_sent = {name: part.shape for name, part in sent.items()}
    for name in sorted({*of_sent, *of_wanted}):
        if of_sent.get(name) != of_wanted.get(name):
            raise SpecError(
                f"{name!r} has shape {of_sent.get(name, 'none')} in the engine that sends its weights, and "
                f"{of_wanted.get(name, 'none')} in the one that gets them: give both the same model"
            )


def _buckets(sizes: Sequence[tuple[str, int]], most: int) -> list[list[str]]:
    """Return names in runs of at most so many bytes, or of one tensor."""
    found: list[list[str]] = []
    room = 0
    for name, size in sizes:
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(name)
        room -= size
    return found


def _minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
