"""A transformer layer under a mode of tensor parallelism: traced on simulated ranks, timed by the planner's clock.

The layer is split by :func:`meshfold.tensor_parallel.parallelize` and runs forward and backward on meta tensors. Its operators, its
collectives and its most bytes alive are those of the code that trains. Nothing overlaps: every collective is awaited.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn

from experiments.sequence_parallelism.bert import Stack
from meshfold.mesh import Mesh, record
from meshfold.mesh.model_io import DryRun, LiveBytes, saved_for_backward
from meshfold.mesh.testing import fake_world
from meshfold.planner import Machine
from meshfold.planner.clock import Work
from meshfold.tensor_parallel import MODES, parallelize

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A layer and what it works on. Every token attends to its whole sequence, and all scores are stored.

    Attributes:
        hidden: channels.
        heads: of attention.
        sequence: tokens.
        batch: sequences of all ranks together.
        precision: of all tensors.
    """

    hidden: int
    heads: int
    sequence: int
    batch: int
    precision: str = "fp32"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return PRECISIONS[self.precision].itemsize

    @property
    def stream(self) -> int:
        """Bytes of the whole residual stream."""
        return self.batch * self.sequence * self.hidden * self.itemsize

    @property
    def parameters(self) -> int:
        """Of the whole layer, without biases and norms."""
        return 12 * self.hidden**2


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A stack of layers, as a table of a settings.toml has it.

    Attributes:
        precision: of all tensors.
        hidden, heads, sequence: of a layer.
        layers: of the stack.
    """

    precision: str
    hidden: int
    heads: int
    sequence: int
    layers: int

    @property
    def size(self) -> Size:
        """A layer that works on one sequence."""
        return Size(hidden=self.hidden, heads=self.heads, sequence=self.sequence, batch=1, precision=self.precision)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A mode and the sizes of its axes, outermost first; ranks have consecutive numbers along the last axis.

    Attributes:
        mode: a key of ``meshfold.tensor_parallel.MODES``.
        sizes: of its axes.
    """

    mode: str
    sizes: tuple[int, ...]

    @property
    def axes(self) -> dict[str, int]:
        """Name to size."""
        return dict(zip(MODES[self.mode].axes, self.sizes, strict=True))

    @property
    def ranks(self) -> int:
        """All of them."""
        return math.prod(self.sizes)

    @property
    def name(self) -> str:
        """``2d [8, 8]``."""
        return f"{self.mode} [{', '.join(map(str, self.sizes))}]"

    def divisor(self) -> int:
        """The number of which a batch must be a multiple."""
        return math.prod(self.axes[axis] for axis in MODES[self.mode].layout("hidden")["m"])


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Collectives of one kind over the same axes.

    Attributes:
        kind: the collective.
        axes: of the mesh.
        ranks: that take part in one.
        calls: of them.
        bytes: that a rank sends in all.
    """

    kind: str
    axes: tuple[str, ...]
    ranks: int
    calls: int
    bytes: float

    @property
    def as_trees(self) -> float:
        """Times this that broadcasts or reductions along trees take, one for each rank's block, whose levels wait for each other.

        A ring sends (g - 1) / g of a gathered tensor, a tree all of it at each of log g levels.
        """
        g = self.ranks
        return g / (g - 1) * math.log2(g) if self.kind in ("all_gather", "reduce_scatter") else 1.0


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Work of a layer on one rank.

    Attributes:
        forward: operators.
        backward: the same, without what recomputation runs again.
        sent: by phase, ``"forward"`` and ``"backward"``.
    """

    forward: Work
    backward: Work
    sent: Mapping[str, tuple[Messages, ...]]

    def moved(self, *phases: str) -> float:
        """Bytes that a rank sends."""
        return sum(one.bytes for phase in phases for one in self.sent[phase])


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of a layer on one rank.

    Attributes:
        peak: the most alive in a forward and backward, gradients of parameters included, parameters and input left out.
        kept: by autograd between them.
        parameters: of them.
        stream: of the input.
    """

    peak: int
    kept: int
    parameters: int
    stream: int


@cache
def trace(grid: Grid, size: Size) -> Traced:
    """Run a layer on the first rank of a grid, and count what it does.

    Raises:
        LayoutError: if the grid does not divide the layer or the batch.
    """
    with DryRun() as stand_in, _layer(grid, size) as (layer, x, dy), record() as log:
        with Work.counted(stand_in) as ahead:
            y = layer(x, size.sequence)
        log.phase = "backward"
        with Work.counted(stand_in) as back:
            y.backward(dy)
    found: dict[tuple[str, str, tuple[str, ...], int], list[float]] = {}
    for entry in log.entries:
        if entry.group_size > 1:
            key = (entry.phase, entry.kind, entry.axes, entry.group_size)
            found.setdefault(key, []).append(float(entry.bytes))
    sent = {
        phase: tuple(
            Messages(kind=kind, axes=axes, ranks=ranks, calls=len(sizes), bytes=sum(sizes))
            for (when, kind, axes, ranks), sizes in found.items()
            if when == phase
        )
        for phase in ("forward", "backward")
    }
    return Traced(forward=Work.of(ahead), backward=Work.of(back), sent=sent)


@cache
def hold(grid: Grid, size: Size) -> Held:
    """Run a layer on the first rank of a grid, and count the bytes that are alive.

    Raises:
        LayoutError: if the grid does not divide the layer or the batch.
    """
    with _layer(grid, size) as (layer, x, dy):
        with saved_for_backward(list(layer.parameters())) as saved:  # apart: it keeps what it has seen
            layer(x, size.sequence)
        with LiveBytes() as alive:
            layer(x, size.sequence).backward(dy)
            peak, _ = alive.take()
        parameters = sum(parameter.nbytes for parameter in layer.parameters())
        return Held(peak=peak, kept=saved.bytes, parameters=parameters, stream=x.nbytes)


@contextmanager
def _layer(grid: Grid, size: Size) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """Context manager: a layer of the first of simulated ranks, its block of the stream, and of the gradient of its output."""
    dtype, mode = PRECISIONS[size.precision], MODES[grid.mode]
    with fake_world(grid.ranks):
        mesh = Mesh(grid.axes)
        with torch.device("meta"):
            stack = Stack(size.hidden, size.heads, layers=1).to(dtype)
        stack.flat_tokens = True  # type: ignore[assignment]
        if grid.ranks > 1:
            parallelize(stack, mesh, mode)
        residual = mode.layout("residual")
        shape = size.batch * size.sequence // mesh.size(*residual["m"]), size.hidden // mesh.size(*residual["h"])
        x = torch.empty(shape, device="meta", dtype=dtype, requires_grad=True)
        yield stack.layers[0], x, torch.empty_like(x)
        mesh.close()


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one layer.

    Attributes:
        forward, backward: of the operators; backward without recomputation.
        forward_sent, backward_sent: of collectives.
    """

    forward: float
    backward: float
    forward_sent: float
    backward_sent: float

    @property
    def inference(self) -> float:
        """A forward."""
        return self.forward + self.forward_sent

    def training(self, *, recompute: bool) -> float:
        """A forward and a backward, and another forward where it is recomputed."""
        return self.inference * (2 if recompute else 1) + self.backward + self.backward_sent

    @property
    def sent(self) -> float:
        """Of collectives, without those that recomputation repeats."""
        return self.forward_sent + self.backward_sent


def seconds(traced: Traced, grid: Grid, size: Size, machine: Machine, *, trees: bool = False) -> Seconds:
    """Time a layer on a machine.

    Args:
        traced: the layer.
        grid: that it was traced on.
        size: of it.
        machine: with ranks in the order of their numbers.
        trees: gathers and scatters are broadcasts and reductions along trees, as in Optimus' formulas; else rings.
    """
    send = partial(_send, traced, grid, machine, trees)
    return Seconds(
        forward=traced.forward.seconds(machine, size.precision),
        backward=traced.backward.seconds(machine, size.precision),
        forward_sent=send("forward"),
        backward_sent=send("backward"),
    )


def _send(traced: Traced, grid: Grid, machine: Machine, trees: bool, phase: str) -> float:
    return sum(
        (one.as_trees if trees else 1) * (one.calls * machine.latency + one.bytes / link_rate(machine, grid, one.axes))
        for one in traced.sent[phase]
    )


def link_rate(machine: Machine, grid: Grid, axes: tuple[str, ...]) -> float:
    """Bytes a second of a rank in rings along the axes, all groups at once.

    Between nodes, the groups that leave a node share its links: a device's share of them is ``machine.between``. A ring enters and
    leaves a node once, so a ring of all its devices has all of its links.
    """
    leaving = _groups_that_leave(machine.devices, tuple(grid.axes.items()), axes)
    return machine.inside if not leaving else min(machine.inside, machine.devices * machine.between / leaving)


@cache
def _groups_that_leave(devices: int, sizes: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> int:
    """The most groups along the axes that have ranks on one node and on others."""
    found: Counter[int] = Counter()
    for ranks in Mesh(dict(sizes), rank=0).groups(*axes):
        nodes = {rank // devices for rank in ranks}
        found.update(nodes if len(nodes) > 1 else ())
    return max(found.values(), default=0)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a rank that trains a stack of layers with recomputation.

    Attributes:
        states: parameters, gradients and what the optimizer keeps.
        inputs: of all layers, which recomputation keeps.
        layer: the most that one layer adds in its backward.
    """

    states: float
    inputs: float
    layer: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.states + self.inputs + self.layer


def memory(held: Held, layers: int, *, state_bytes: float = 2.0, spread: int = 1, recompute: bool = True) -> Memory:
    """Count a rank's bytes.

    Args:
        held: of a layer.
        layers: of the stack.
        state_bytes: of parameters, gradients and moments, in bytes of the parameters; 2: no optimizer.
        spread: ranks that share the kept input of a layer, where it is whole on each.
        recompute: keep the inputs of layers alone.
    """
    inside = held.peak - held.parameters  # gradients of parameters are among the states
    inputs = layers * held.stream / spread if recompute else (layers - 1) * held.kept
    return Memory(states=state_bytes * held.parameters * layers, inputs=inputs, layer=inside + held.stream)


def largest_batch(
    grid: Grid,
    size: Size,
    layers: int,
    room: float,
    *,
    spread: int = 1,
    state_bytes: float = 2.0,
    recompute: bool = True,
) -> int:
    """Sequences of the largest batch that a rank's memory allows: a multiple of what the grid divides; 0 if none does."""
    step = grid.divisor()

    def total(steps: int) -> float:
        held = hold(grid, replace(size, batch=step * steps))
        return memory(held, layers, state_bytes=state_bytes, spread=spread, recompute=recompute).total

    if total(1) > room:
        return 0
    low, high = 1, 2
    while total(high) <= room:
        low, high = high, 4 * high
    while high - low > 1:  # bytes grow nearly in a line: try where it meets the room, and just above
        share = (room - total(low)) / (total(high) - total(low))
        middle = min(high - 1, max(low + 1, low + round(share * (high - low))))
        if total(middle) <= room:
            low = middle
            if total(low + 1) > room:
                break
        else:
            high = middle
    return step * low
