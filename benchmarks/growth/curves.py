"""A step of a stack of transformer layers under one way to split it: seconds, bytes that a rank sends, bytes that it holds.

Layers are traced on simulated ranks by :mod:`experiments.tensor_layers` and timed by the planner's clock. All activations are
computed again in backward. Messages of tensor modes are awaited; those of gradients, parameters and of a ring run beside compute,
so that a phase takes the longer of the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from experiments.tensor_layers import Grid, Size, hold, link_rate, memory, seconds, trace
from meshfold.mesh import LayoutError
from meshfold.planner import Machine
from meshfold.planner.clock import optimizer_seconds

RANKS = (4, 16, 64, 256, 1024, 4096)
STATE_BYTES = 16
"""Bytes a parameter with AdamW: bf16 weight and gradient, float32 master weight and two moments."""
WAYS = ("data", "zero-3", "pipeline", "ring", "1d", "1d+sequence", "2d", "2.5d", "3d")


@dataclass(frozen=True, kw_only=True)
class Work:
    """Model and batch of a point.

    Attributes:
        layers: of the stack.
        size: of a layer and the global batch.
    """

    layers: int
    size: Size

    @property
    def parameters(self) -> int:
        """Parameters of all layers, without biases and norms."""
        return self.layers * self.size.parameters


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way on a number of ranks.

    Attributes:
        way: one of :data:`WAYS`.
        ranks: world size.
        parameters: of the model.
        seconds: of a step.
        sent: bytes that a rank sends in it.
        held: bytes of a rank.
        fits: in the machine's memory.
        efficiency: share of the rate that the ranks would reach without any message, copy or idle time.
    """

    way: str
    ranks: int
    parameters: int
    seconds: float
    sent: float
    held: float
    fits: bool
    efficiency: float


def strong(ranks: int) -> Work:
    """Return 103 billion parameters in 32 layers, and 1,024 sequences of 512 tokens, on any number of ranks."""
    return Work(layers=32, size=Size(hidden=16384, heads=128, sequence=512, batch=1024, precision="bf16"))


def weak(ranks: int) -> Work:
    """Return five layers whose parameters grow with the ranks, from 1 to 1,031 billion, and the same batch."""
    wider = math.isqrt(ranks // RANKS[0])
    return Work(layers=5, size=Size(hidden=4096 * wider, heads=32 * wider, sequence=512, batch=1024, precision="bf16"))


def grid_of(way: str, ranks: int) -> Grid:
    """Return the grid of a tensor mode: squares, squares four deep, and boxes as near to cubes as can be."""
    side = math.isqrt(ranks)
    if way == "2d":
        return Grid(mode="2d", sizes=(side, side))
    if way == "2.5d":
        depth = 4 if ranks >= 16 else 1
        return Grid(mode="2.5d", sizes=(depth, math.isqrt(ranks // depth), math.isqrt(ranks // depth)))
    if way == "3d":
        power = ranks.bit_length() - 1
        return Grid(mode="3d", sizes=tuple(2 ** (power // 3 + (place < power % 3)) for place in range(3)))
    return Grid(mode=way, sizes=(ranks,))


def point(way: str, ranks: int, work: Work, machine: Machine) -> Point | None:
    """Return the numbers of a way; None if it cannot split this model into so many."""
    try:
        spent, sent, held = _tensor(way, ranks, work, machine) if way in _MODES else _other(way, ranks, work, machine)
    except (LayoutError, _CannotSplit):  # it has fewer heads, rows or columns than ranks
        return None
    sequence = trace(_ONE, replace(work.size, batch=1)).forward.flop
    flop = 3 * sequence * work.size.batch / ranks * work.layers  # recomputation is no progress
    ideal = flop / (machine.efficiency.matmuls * machine.flops[work.size.precision])
    return Point(
        way=way,
        ranks=ranks,
        parameters=work.parameters,
        seconds=spent,
        sent=sent,
        held=held,
        fits=held <= machine.memory,
        efficiency=ideal / spent,
    )


class _CannotSplit(Exception):
    """A way has fewer rows, layers or tokens than ranks."""


_MODES = ("1d", "1d+sequence", "2d", "2.5d", "3d")
_ONE = Grid(mode="1d", sizes=(1,))


def _tensor(way: str, ranks: int, work: Work, machine: Machine) -> tuple[float, float, float]:
    """Return seconds, sent and held bytes of a tensor mode, traced."""
    grid = grid_of(way, ranks)
    if work.size.batch % grid.divisor():
        raise _CannotSplit
    traced = trace(grid, work.size)
    layer = seconds(traced, grid, work.size, machine).training(recompute=True)
    held = hold(grid, work.size)
    total = memory(held, work.layers, state_bytes=STATE_BYTES / work.size.itemsize)
    update = optimizer_seconds(_moved(held.parameters / work.size.itemsize * work.layers), machine)
    sent = work.layers * (traced.moved("forward", "backward") + traced.moved("forward"))
    return work.layers * layer + update, sent, total.total


def _moved(parameters: float) -> int:
    """Return the bytes that a step of AdamW reads and writes."""
    return int(parameters * (2 + 2 * 4 + 2 * 8 + 2))


def _other(way: str, ranks: int, work: Work, machine: Machine) -> tuple[float, float, float]:
    """Return seconds, sent and held bytes of data parallelism, ZeRO 3, a pipeline, or a ring over tokens."""
    size, layers = work.size, work.layers
    line = Grid(mode="1d", sizes=(ranks,))
    rate, share = link_rate(machine, line, tuple(line.axes)), (ranks - 1) / ranks
    weights = size.parameters * size.itemsize
    if way == "pipeline":
        return _pipeline(ranks, work, machine)
    if (size.sequence if way == "ring" else size.batch) % ranks or size.batch % ranks:
        raise _CannotSplit
    own = replace(size, batch=size.batch // ranks)  # as many tokens, of all sequences, in a ring
    one, held = seconds(trace(_ONE, own), _ONE, own, machine), hold(_ONE, own)
    whole = memory(held, layers, state_bytes=STATE_BYTES / size.itemsize)
    states, moved = whole.states, _moved(size.parameters * layers)
    local = size.stream / ranks
    # Bytes of a layer beside its forward, and beside its backward, which computes the forward again.
    if way == "data":
        ahead, back = 0.0, 2 * share * weights
    elif way == "zero-3":
        ahead, back = share * weights, 2 * share * weights
        states, moved = states / ranks + 2 * weights * 2, moved // ranks
    else:
        keys = 2 * (ranks - 1) * local
        ahead, back = keys, 3 * keys + 2 * share * weights
    forward = max(one.forward, ahead / rate + machine.latency)
    backward = max(one.forward + one.backward, back / rate + machine.latency)
    spent = layers * (forward + backward) + optimizer_seconds(moved, machine)
    return spent, layers * (ahead + back), states + whole.inputs + whole.layer


def _pipeline(ranks: int, work: Work, machine: Machine) -> tuple[float, float, float]:
    """Return the numbers of 1F1B with as many micro-batches as sequences, at most eight for each rank."""
    size, stage = work.size, work.layers // ranks
    if work.layers % ranks:
        raise _CannotSplit
    micro = min(size.batch, 8 * ranks)
    own = replace(size, batch=size.batch // micro)
    held = hold(_ONE, own)
    one = seconds(trace(_ONE, own), _ONE, own, machine).training(recompute=True) * stage
    line = Grid(mode="1d", sizes=(ranks,))
    message = own.stream / link_rate(machine, line, tuple(line.axes)) + machine.latency
    total = memory(held, stage, state_bytes=STATE_BYTES / size.itemsize)
    update = optimizer_seconds(_moved(size.parameters * stage), machine)
    return (
        (micro + ranks - 1) * (one + 2 * message) + update,
        2 * micro * own.stream,
        total.states + min(ranks, micro) * total.inputs + total.layer,
    )


def curve(kind: str, machine: Machine, most: int) -> Iterator[dict[str, object]]:
    """Yield the points of ``strong`` or ``weak`` scaling up to so many ranks, with the ways that cannot split as far left out."""
    work = {"strong": strong, "weak": weak}[kind]
    for ranks in RANKS:
        if ranks > most:
            return
        for way in WAYS:
            found = point(way, ranks, work(ranks), machine)
            if found is not None:
                yield {"kind": kind, **asdict(found)}
