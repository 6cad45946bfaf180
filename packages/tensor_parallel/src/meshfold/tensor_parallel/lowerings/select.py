"""Choice of a lowering by estimated time, and the lowering ``auto`` that makes it for each call.

The time of a plan is estimated from its cost, collective by collective (latency + bytes / bandwidth), and from the
multiplications of one rank. Communication hidden under ``n`` partial matmuls takes the longer of the two plus one
part of the shorter, to fill the pipeline; the rest adds up. Only the order of the estimates matters.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from meshfold.mesh import LayoutError, Mesh, did_you_mean
from meshfold.mesh.recording import Kind
from meshfold.tensor_parallel.cost import Cost, CostEntry, CostQuery
from meshfold.tensor_parallel.lowerings.common import Lowering, Pair, brick_sizes
from meshfold.tensor_parallel.lowerings.gather import Gather
from meshfold.tensor_parallel.lowerings.push import Push
from meshfold.tensor_parallel.lowerings.ring import Ring
from meshfold.tensor_parallel.lowerings.summa import Summa
from meshfold.tensor_parallel.plan import MatmulPlan, Phase
from meshfold.tensor_parallel.plan import plan as parse

WAYS: dict[str, Lowering] = {"gather": Gather(), "stream": Summa(), "ring": Ring()}
"""The lowerings there are to choose from; of equals the first is taken."""

_PHASES: tuple[Phase, ...] = ("forward", "dx", "dw")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds of a machine, for estimates. The defaults were fitted to four H200 joined by NVLink (NCCL, bf16).

    Attributes:
        flops: multiplications and additions a second of a large matmul.
        matmul_s: what cutting a matmul costs, seconds a piece.
        bandwidth: bytes a second that a rank moves in large collectives of a kind, counted as ``Cost`` does.
        latency_s: seconds that a small collective of a kind takes.
    """

    flops: float = 700e12
    matmul_s: float = 15e-6
    bandwidth: Mapping[Kind, float] = field(
        default_factory=lambda: {
            "all_gather": 325e9,
            "reduce_scatter": 323e9,
            "all_reduce": 355e9,
            "all_to_all": 336e9,
            "broadcast": 360e9,
            "shift": 358e9,
        }
    )
    latency_s: Mapping[Kind, float] = field(
        default_factory=lambda: {
            "all_gather": 20e-6,
            "reduce_scatter": 20e-6,
            "all_reduce": 22e-6,
            "all_to_all": 30e-6,
            "broadcast": 18e-6,
            "shift": 43e-6,
        }
    )

    def seconds(self, entry: CostEntry) -> float:
        """Return the time of a single collective."""
        return self.latency_s[entry.kind] + float(entry.bytes) / self.bandwidth[entry.kind]


H200 = Machine()


def choose(
    plan: MatmulPlan,
    sizes: Mapping[str, int],
    mesh: Mesh,
    itemsize: int = 2,
    *,
    machine: Machine = H200,
    keep: frozenset[str] = frozenset(),
) -> str:
    """Return the name of the lowering expected to be fastest, forward and backward together.

    Args:
        plan: to be executed.
        sizes: elements of m, k and n, over all ranks of the axes that the layouts name.
        mesh: gives the sizes of the axes.
        itemsize: bytes an element.
        machine: for the estimate.
        keep: gathered operands that forward keeps for backward.
    """
    times = {
        name: estimate(plan, name, sizes, mesh, itemsize, machine=machine, keep=keep)
        for name, way in WAYS.items()
        if not way.refuses(plan)
    }
    return min(times, key=lambda name: times[name])


def estimate(
    plan: MatmulPlan,
    lowering: str,
    sizes: Mapping[str, int],
    mesh: Mesh,
    itemsize: int = 2,
    *,
    machine: Machine = H200,
    keep: frozenset[str] = frozenset(),
) -> float:
    """Return the seconds for forward and backward of a plan executed in one of :data:`WAYS`."""
    query = CostQuery(sizes=sizes, mesh=mesh, itemsize=itemsize, phases=_PHASES, keep=keep)
    cost = WAYS[lowering].cost(plan, query)
    multiply = 2.0 / machine.flops
    for dim, axes in plan.compute.items():
        multiply *= sizes[dim] / mesh.size(*axes)
    if lowering == "gather":
        return _gather_seconds(cost, multiply, machine)
    return sum(_pipelined_seconds(cost, phase, lowering, multiply, machine) for phase in _PHASES)


def _gather_seconds(cost: Cost, multiply: float, machine: Machine) -> float:
    """Estimate the backward: x is gathered while dx is multiplied, and dx is reduced while dw is; nothing else overlaps."""
    under_dx = sum(machine.seconds(e) for e in cost.entries if e.phase == "dw" and e.operand == "x")
    under_dw = sum(machine.seconds(e) for e in cost.entries if e.phase == "dx" and e.operand == "dx")
    total = sum(machine.seconds(e) for e in cost.entries)
    return total - under_dx - under_dw + multiply + max(multiply, under_dx) + max(multiply, under_dw)


def _pipelined_seconds(cost: Cost, phase: Phase, lowering: str, multiply: float, machine: Machine) -> float:
    entries = [e for e in cost.entries if e.phase == phase]
    hidden = [e for e in entries if _is_hidden(e, lowering)]
    pieces = max(Counter((e.operand, e.kind, e.axes) for e in hidden).values(), default=0)
    if lowering == "ring":
        pieces += 1  # g blocks; g − 1 of them are sent
    pieces = max(pieces, 1)
    under = sum(machine.seconds(e) for e in hidden)
    waited = sum(machine.seconds(e) for e in entries) - under
    cut = multiply + (pieces - 1) * machine.matmul_s
    return waited + max(cut, under) + min(cut, under) / pieces


def _is_hidden(entry: CostEntry, lowering: str) -> bool:
    """Return True if a collective overlaps with partial matmuls."""
    if lowering == "ring":
        return entry.kind == "shift"
    if entry.phase == "forward":
        return entry.kind == "broadcast"
    return entry.kind in ("all_gather", "reduce_scatter") and entry.operand != "dy"


class Auto:
    """Choice by the sizes at hand."""

    def refuses(self, plan: MatmulPlan) -> str:
        """Return an empty string: every plan can be executed by some lowering."""
        return ""

    def prepare(self, plan: MatmulPlan, mesh: Mesh) -> None:
        """Make the groups of every lowering that may be chosen."""
        for way in WAYS.values():
            if not way.refuses(plan):
                way.prepare(plan, mesh)

    def forward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, keep: frozenset[str]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return _way(plan, mesh, x, w).forward(plan, mesh, x, w, keep)

    def backward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, dy: Tensor, *, wants: tuple[bool, bool], kept: Pair
    ) -> Pair:
        return _way(plan, mesh, x, w).backward(plan, mesh, x, w, dy, wants=wants, kept=kept)

    def cost(self, plan: MatmulPlan, query: CostQuery) -> Cost:
        return WAYS[choose(plan, query.sizes, query.mesh, query.itemsize)].cost(plan, query)


def _way(plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor) -> Lowering:
    layouts = str(plan.x), str(plan.w), str(plan.y)
    return WAYS[_decide(layouts, plan.entered, tuple(mesh.axes.items()), tuple(x.shape), w.shape[0], x.element_size())]


@lru_cache(maxsize=4096)
def _known(
    layouts: tuple[str, str, str],
    entered: bool,
    axes: tuple[tuple[str, int], ...],
    x: tuple[int, ...],
    n: int,
    itemsize: int,
) -> str:
    """Return the cached choice for local blocks: ``x`` is the shape of x, ``n`` the rows of w. Called at every forward."""
    found, mesh = replace(parse(*layouts), entered=entered), Mesh(dict(axes), rank=0)
    local = brick_sizes(found, mesh, x, n)
    return choose(found, {dim: size * mesh.size(*found.compute[dim]) for dim, size in local.items()}, mesh, itemsize)


def _decide(*key: Any) -> str:
    return _known(*key)


# torch.compile treats the result as a constant instead of tracing the search. This is what
# torch.compiler.assume_constant_result does, without importing the compiler.
_decide._dynamo_marked_constant = True  # type: ignore[attr-defined]


LOWERINGS: dict[str, Lowering] = {**WAYS, "push": Push(), "auto": Auto()}
"""All lowerings by name. ``auto`` does not choose ``push``, whose time depends on whether the ranks reach each other's memory."""


def find_lowering(name: str, plan: MatmulPlan) -> Lowering:
    """Return the lowering of a name.

    Raises:
        LayoutError: if no lowering has that name, or it cannot execute the plan.
    """
    found = LOWERINGS.get(name)
    if found is None:
        raise LayoutError(f"no lowering {name!r}.{did_you_mean(name, LOWERINGS)} There are {', '.join(LOWERINGS)}")
    reason = found.refuses(plan)
    if reason:
        raise LayoutError(f"lowering {name!r} does not apply: {reason}; use 'gather' or 'auto'")
    return found


def matmul_cost(
    plan: MatmulPlan,
    sizes: Mapping[str, int],
    mesh: Mesh,
    *,
    itemsize: int = 2,
    lowering: str = "gather",
    phases: tuple[Phase, ...] = _PHASES,
    keep: frozenset[str] = frozenset(),
) -> Cost:
    """Return a plan's collectives with their bytes: exactly what the recorder sees when the plan is executed.

    Args:
        plan: from :func:`meshfold.tensor_parallel.plan`.
        sizes: elements of m, k and n, over all ranks of the axes that the layouts name.
        mesh: gives the sizes of the axes.
        itemsize: bytes an element.
        lowering: ``"gather"``, ``"stream"``, ``"ring"``, ``"push"`` or ``"auto"``.
        phases: which of the three products are computed.
        keep: ``{"x", "w"}`` or fewer: gathered operands that forward keeps for backward.

    Raises:
        LayoutError: if a size is missing or its axes do not divide it, or the lowering does not apply.
    """
    plan.check_sizes(sizes, mesh)
    found = find_lowering(lowering, plan)
    return found.cost(plan, CostQuery(sizes=sizes, mesh=mesh, itemsize=itemsize, phases=phases, keep=keep))


def _cost(self: MatmulPlan, *args: Any, **kwargs: Any) -> Cost:
    """Return ``matmul_cost(plan, ...)``. A method until version 0.1, deprecated."""
    warnings.warn(
        "MatmulPlan.cost(...) is now a function: write matmul_cost(plan, ...)",
        DeprecationWarning,
        stacklevel=2,
    )
    return matmul_cost(self, *args, **kwargs)


# Attached here because plan.py must not import the lowerings.
MatmulPlan.cost = _cost  # type: ignore[attr-defined]
