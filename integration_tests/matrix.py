"""The matrix of specs: which of them are trained against one process, so that every pair of entries meets.

A **dimension** is an entry of the spec, a **value** one way to write it. A **member** takes a value of each dimension, or
leaves it out, for a number of ranks that it fills. Members are chosen, not listed: :func:`covering` takes members until
every combination of so many values that can be written at all is in one of them. A new tensor-parallel mode or schedule
is a row here, and is then tried with everything else.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

Entry = dict[str, Any]
Combination = frozenset[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Value:
    """One way to write an entry.

    Attributes:
        entry: what it adds to the spec.
        kind: what it has in common with others of its dimension, where more than two values meet.
        ranks: how many ranks it takes.
    """

    entry: Entry
    kind: str
    ranks: int = 1


def _pipeline(schedule: str, size: int = 2, *, kind: str, **settings: Any) -> Value:
    return Value(entry=dict(pipeline=dict(size=size, schedule=schedule, **settings)), kind=kind, ranks=size)


def _sequence(mode: str, size: int, **settings: Any) -> Value:
    return Value(entry=dict(sequence=dict(mode=mode, size=size, **settings)), kind=mode, ranks=size)


def _tensor(mode: str, *grid: int, **settings: Any) -> Value:
    sizes: Entry = dict(size=grid[0]) if mode == "1d" else dict(grid=grid)
    entry = dict(tensor=dict(mode=mode, **sizes, **settings))
    return Value(entry=entry, kind=mode, ranks=math.prod(grid) * settings.get("depth", 1))


def _zero(stage: int, **settings: Any) -> Value:
    return Value(entry=dict(zero=dict(stage=stage, **settings)), kind=f"stage {stage}")


OFF = "-"
"""The value of a dimension that a member leaves out"""

DIMENSIONS: dict[str, dict[str, Value]] = {
    "data": {
        "2": Value(entry=dict(data=2), kind="on", ranks=2),
        "4": Value(entry=dict(data=4), kind="on", ranks=4),
    },
    "pipeline": {
        "1f1b": _pipeline("1f1b", kind="one chunk"),
        "gpipe 4": _pipeline("gpipe", 4, kind="one chunk"),
        "interleaved": _pipeline("interleaved", chunks=2, kind="several chunks"),
        "zb-h1": _pipeline("zb-h1", kind="one chunk"),
        "zb-h2 4": _pipeline("zb-h2", 4, kind="one chunk"),
        "zb-v": _pipeline("zb-v", kind="several chunks"),
        "hanayo": _pipeline("hanayo", waves=1, kind="several chunks"),
        "dualpipe-v": _pipeline("dualpipe-v", kind="several chunks"),
        "auto": _pipeline("auto", kind="one chunk"),
    },
    "sequence": {
        "megatron": Value(entry=dict(sequence=dict(mode="megatron")), kind="megatron"),
        "ring": _sequence("ring", 2),
        "ring 4": _sequence("ring", 4),
        "ulysses": _sequence("ulysses", 2),
        "ring_ulysses": _sequence("ring_ulysses", 4, ulysses=2),
    },
    "tensor": {
        "1d": _tensor("1d", 2),
        "1d 4": _tensor("1d", 4),
        "1d ring": _tensor("1d", 2, overlap="ring"),
        "2d 2×1": _tensor("2d", 2, 1),
        "2d 1×2": _tensor("2d", 1, 2),
        "2d 2×2": _tensor("2d", 2, 2),
        "2d stream": _tensor("2d", 2, 2, overlap="stream"),
        "2d 2×4": _tensor("2d", 2, 4),
        "2.5d 1×1×2": _tensor("2.5d", 1, 2, depth=1),
        "2.5d 2×1×2": _tensor("2.5d", 1, 2, depth=2),
        "2.5d 2×1×1": _tensor("2.5d", 1, 1, depth=2),
        "2.5d 2×2×2": _tensor("2.5d", 2, 2, depth=2),
        "3d 2×1×1": _tensor("3d", 2, 1, 1),
        "3d 1×1×2": _tensor("3d", 1, 1, 2),
        "3d 2×1×2": _tensor("3d", 2, 1, 2),
        "3d 2×2×2": _tensor("3d", 2, 2, 2),
    },
    "zero": {
        "1": _zero(1),
        "2 cpu": _zero(2, placement="cpu"),
        "3": _zero(3, placement="cuda"),
        "3 auto": _zero(3, placement="auto"),
        "3 cpu": _zero(3, placement="cpu"),
    },
}
MODELS = ("gpt", "llama")
MIXTURE = "mixture"
"""A model of its own, for members with experts over ranks."""

# Values that cannot stand together, each with words of the error: what a user reads.
REFUSED: list[tuple[Callable[[Mapping[str, str]], bool], str]] = [
    (lambda at: at["sequence"] == "megatron" and not at["tensor"].startswith("1d"), "megatron"),
]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One spec, and the model that is trained under it.

    Attributes:
        values: of every dimension, :data:`OFF` where it is left out.
        model: of :data:`MODELS`, or :data:`MIXTURE`.
        experts: how many ranks share the experts of a mixture; they are among those of data, sequence and tensor. 0: no entry.
    """

    values: tuple[str, ...]
    model: str
    experts: int = 0

    @property
    def at(self) -> dict[str, str]:
        """The value of each dimension."""
        return dict(zip(DIMENSIONS, self.values, strict=True))

    @property
    def spec(self) -> Entry:
        """What a user writes."""
        found: Entry = {}
        for dimension, value in self.at.items():
            found |= {} if value == OFF else DIMENSIONS[dimension][value].entry
        return {**found, "expert": dict(size=self.experts)} if self.experts else found

    @property
    def ranks(self) -> int:
        """How many it fills."""
        return math.prod(DIMENSIONS[d][v].ranks for d, v in self.at.items() if v != OFF)

    @property
    def name(self) -> str:
        """A test's id."""
        named = [f"{d} {v}" for d, v in self.at.items() if v != OFF]
        return ", ".join([self.model, *named, *([f"experts {self.experts}"] if self.experts else [])])

    @property
    def refusal(self) -> str | None:
        """Words of the error if this cannot be; None if it can."""
        return next((words for holds, words in REFUSED if holds(self.at)), None)

    def combinations(self, count: int) -> Iterator[Combination]:
        """All sets of so many of its values, the model among them."""
        chosen = [(d, v) for d, v in self.at.items() if v != OFF]
        yield from map(frozenset, itertools.combinations([*chosen, ("model", self.model)], count))

    def meetings(self, count: int) -> Iterator[Combination]:
        """All sets of so many of its values' kinds."""
        kinds = [(d, DIMENSIONS[d][v].kind) for d, v in self.at.items() if v != OFF]
        yield from map(frozenset, itertools.combinations(kinds, count))


@functools.cache
def members(ranks: int) -> tuple[Member, ...]:
    """All that fill so many ranks and are not refused."""
    choices = itertools.product(*([OFF, *values] for values in DIMENSIONS.values()))
    found = [Member(values=values, model=model) for values in choices for model in MODELS]
    return tuple(member for member in found if member.ranks == ranks and member.refusal is None)


def covering(candidates: Iterable[Member], wanted: Callable[[Member], Iterable[Any]]) -> list[Member]:
    """Few members that together have everything that any candidate has: the one with the most that is new, over and over.

    Args:
        candidates: the members to choose from; of equally good ones the first.
        wanted: what a member has.
    """
    has = [(member, set(wanted(member))) for member in candidates]  # what it has, and no chosen one when last looked at
    queue = [(-len(found), place) for place, (_, found) in enumerate(has)]
    heapq.heapify(queue)
    chosen: list[Member] = []
    covered: set[Any] = set()
    while queue:
        count, place = heapq.heappop(queue)
        member, found = has[place]
        found -= covered
        if len(found) < -count:  # others may have more that is new by now
            if found:
                heapq.heappush(queue, (-len(found), place))
        elif found:
            chosen.append(member)
            covered |= found
    return chosen


@functools.cache
def short() -> tuple[Member, ...]:
    """On four ranks: every pair of dimensions with nothing else, and every value that four ranks can have."""

    def wanted(member: Member) -> Iterator[Any]:
        on = [(d, v) for d, v in member.at.items() if v != OFF]
        yield from on
        if len(on) == 2:
            yield frozenset(d for d, _ in on)

    chosen = covering(members(4), wanted)
    return tuple(replace(member, model=model) for member, model in zip(chosen, itertools.cycle(MODELS), strict=False))


@functools.cache
def long() -> tuple[Member, ...]:
    """Every pair of values, on four ranks or else on eight; on eight every triple and quadruple of kinds of values."""
    four = covering(members(4), lambda member: member.combinations(2))
    seen = {pair for member in four for pair in member.combinations(2)}

    def wanted(member: Member) -> Iterator[Any]:
        yield from (pair for pair in member.combinations(2) if pair not in seen)
        yield from member.meetings(3)
        yield from member.meetings(4)

    return (*four, *covering(members(8), wanted))


@functools.cache
def mixtures(ranks: int) -> tuple[Member, ...]:
    """Members with a mixture on so many ranks: experts over 2, 4 and 8 beside every value that has room for them."""

    def candidates() -> Iterator[Member]:
        for member in members(ranks):
            stages = 1 if member.at["pipeline"] == OFF else DIMENSIONS["pipeline"][member.at["pipeline"]].ranks
            for size in (2, 4, 8):
                if member.model == MODELS[0] and ranks // stages % size == 0:
                    yield replace(member, model=MIXTURE, experts=size)

    def wanted(member: Member) -> Iterator[Any]:
        on = [(d, v) for d, v in member.at.items() if v != OFF]
        yield from ((member.experts, *pair) for pair in on)
        if ranks == 4:
            yield from member.meetings(2)

    seen = {one for member in mixtures(4) for one in wanted(member)} if ranks > 4 else set()
    return tuple(covering(candidates(), lambda member: (one for one in wanted(member) if one not in seen)))
