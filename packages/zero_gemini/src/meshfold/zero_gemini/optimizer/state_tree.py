"""Optimizer state: as a flat table of named tensors and numbers, counted in arenas, and as a snapshot to copy later.

The table is of one parameter, and restores the state bit for bit.

Optimizers that need whole matrices keep lists of them, and Python numbers as well as tensors. A name encodes the
structure: ``gram[0]`` is the first of a list, ``moments(1)`` the second of a tuple, ``sizes.rows`` an entry of a dict;
``count=int`` is a Python number, ``gram[1]=list`` an empty list. A plain tensor keeps its plain name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import QuantizedState, join_master
from meshfold.mesh.parameters import StoredValue
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.memory.arena import Arena, Block, MemoryTier
from meshfold.zero_gemini.optimizer.master_weights import Plane

_NUMBERS: dict[str, type] = {"bool": bool, "int": int, "float": float}
_EMPTY: dict[str, type] = {"list": list, "tuple": tuple, "dict": dict}
_STEP = re.compile(r"\[(\d+)\]|\((\d+)\)|\.([^.\[\(=]+)")


def flatten(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return every leaf of a parameter's state by its name; numbers as tensors of one element on the CPU.

    Raises:
        MemoryPlanError: for anything but tensors, numbers, and lists, tuples or dicts of them.
    """
    return {name: value for key, value in state.items() for name, value in _leaves(_checked(key), value)}


def unflatten(leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """Undo :func:`flatten`; tensors are not copied."""
    tree: dict[str, Any] = {}
    for name, value in leaves.items():
        path, _, kind = name.partition("=")
        steps: list[tuple[str, Any]] = [("dict", re.split(r"[.\[\(]", path, maxsplit=1)[0])]
        for place in _STEP.finditer(path, len(steps[0][1])):
            index, position, key = place.groups()
            steps.append(("list", int(index)) if index else ("tuple", int(position)) if position else ("dict", key))
        node = tree
        for (_, key), (kind_below, _) in pairwise(steps):
            node = node.setdefault(key, {"": kind_below})
        node[steps[-1][1]] = _leaf(value, kind)
    return {key: _built(value) for key, value in tree.items()}


def moved(value: Any, old: torch.device, new: torch.device) -> Any:
    """Return state on its parameter's device, if it was there before."""
    if isinstance(value, Tensor):
        return value.to(new) if value.device == old else value
    if isinstance(value, dict):
        return {key: moved(below, old, new) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(below, old, new) for below in value)
    return value


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif value is None:
        yield f"{name}=none", torch.tensor(0)
    elif type(value) in _NUMBERS.values():
        wide = torch.float64 if isinstance(value, float) else torch.int64
        yield f"{name}={type(value).__name__}", torch.tensor(value, dtype=wide)
    elif type(value) in _EMPTY.values():
        if not value:
            yield f"{name}={type(value).__name__}", torch.tensor(0)
        elif isinstance(value, dict):
            for key, below in value.items():
                yield from _leaves(f"{name}.{_checked(key)}", below)
        else:
            around = "[{}]" if isinstance(value, list) else "({})"
            for place, below in enumerate(value):
                yield from _leaves(name + around.format(place), below)
    else:
        raise MemoryPlanError(
            f"the optimizer keeps {type(value).__name__} {value!r} as {name!r}, which a checkpoint cannot hold: keep tensors, "
            "numbers, None, and lists, tuples or dicts of them"
        )


def _checked(key: object) -> str:
    if not isinstance(key, str) or not key or re.search(r"[.\[\(=/]", key):
        raise MemoryPlanError(
            f"the optimizer keeps something under the key {key!r}: for a checkpoint, keys are words without any of . [ ( = /"
        )
    return key


def _leaf(value: Tensor, kind: str) -> Any:
    if not kind:
        return value
    if kind == "none":
        return None
    return _EMPTY[kind]() if kind in _EMPTY else _NUMBERS[kind](value.item())


def _built(node: Any) -> Any:
    if not isinstance(node, dict) or "" not in node:
        return node
    kind = node[""]
    below = {key: _built(value) for key, value in node.items() if key != ""}
    return below if kind == "dict" else _EMPTY[kind](below[place] for place in sorted(below))


STATE = "optimizer state"


class CountedState:
    """The tensors that an optimizer has of some chunks."""

    def __init__(self, tensors_of: Callable[[Chunk], Iterable[Tensor]], places: Mapping[Chunk, MemoryTier]) -> None:
        """Args:
        tensors_of: yields the tensors of a chunk's state.
        places: memory tier of each chunk's state; may change.
        """
        self._tensors_of, self._places = tensors_of, places
        self._blocks: dict[int, Block] = {}  # by the tensor's id

    def missing(self, places: Mapping[Chunk, MemoryTier]) -> Iterator[tuple[Tensor, Arena]]:
        """Yield the tensors to account for, with the arena of each, if chunks had these placements."""
        for chunk, place in places.items():
            arena = chunk.memory.arena(place)
            for value in self._tensors_of(chunk):
                known = self._blocks.get(id(value))
                if known is None or known.arena is not arena:
                    yield value, arena

    def update(self) -> None:
        """Account for the state that exists now, and stop accounting for state that is gone.

        Raises:
            OutOfBudget: if the optimizer took more than was left.
        """
        there = {id(value) for chunk in self._places for value in self._tensors_of(chunk)}
        missing = {id(value): (value, arena) for value, arena in self.missing(self._places)}
        for key in [key for key in self._blocks if key not in there or key in missing]:
            self._blocks.pop(key).free()
        for key, (value, arena) in missing.items():
            self._blocks[key] = arena.count(value, STATE)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkSnapshot:
    """The state of a chunk that is in memory.

    Attributes:
        dtype: in which the model computes.
        weights: of the shard.
        planes: stored in addition, by name; none of state on a disk.
    """

    dtype: torch.dtype
    weights: Tensor
    planes: Mapping[str, tuple[Plane, Tensor]]

    def parts(self, begin: int, end: int, key: str | None) -> StoredValue:
        """Return views of elements ``begin`` to ``end`` of a moment, or of the master weights for None."""
        if key is None and self.dtype == torch.float32:
            return StoredValue((self.weights[begin:end],))
        planes = self._cut(begin, end, ("parameter", "lo") if key is None else (key, f"{key}_scale"))
        if key is None:
            if self.dtype == torch.float16:
                return StoredValue(planes)
            return StoredValue((self.weights[begin:end], *planes), _master)
        if len(planes) > 1:
            return StoredValue(planes, partial(_moment, key))
        return StoredValue(planes) if planes[0].dtype == torch.float32 else StoredValue(planes, _widened)

    def _cut(self, begin: int, end: int, names: Collection[str]) -> tuple[Tensor, ...]:
        found = (self.planes[name] for name in names if name in self.planes)
        return tuple(tensor[begin // plane.each : plane.numel(end)] for plane, tensor in found)


@dataclass(frozen=True, kw_only=True, eq=False)
class AdamSnapshot:
    """The state of all chunks, none of it on a disk.

    Attributes:
        chunks: by chunk.
        chunk_of: each parameter's, by name.
        steps: of each parameter.
    """

    chunks: Mapping[Chunk, ChunkSnapshot]
    chunk_of: Mapping[str, Chunk]
    steps: Mapping[str, int]

    def parts(self, name: str, key: str | None) -> StoredValue:
        """Return this rank's part of a parameter's moment, or of its master weights if ``key`` is None; ``"step"`` is a
        number."""
        if key == "step":
            return StoredValue((torch.tensor(float(self.steps[name])),))
        chunk = self.chunk_of[name]
        return self.chunks[chunk].parts(*chunk.span(name), key)


def _master(planes: Sequence[Tensor]) -> Tensor:
    """Return master weights from their two planes."""
    return join_master(*planes)


def _moment(key: str, planes: Sequence[Tensor]) -> Tensor:
    """Return a moment from its codes and scales."""
    return QuantizedState.decoded(key, *planes)


def _widened(planes: Sequence[Tensor]) -> Tensor:
    """Return a moment that is stored in fewer bits."""
    return planes[0].float()
