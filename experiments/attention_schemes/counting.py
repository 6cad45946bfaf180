"""One attention over a split causal sequence: what the busiest rank computes and sends, counted on simulated ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from meshfold.mesh import Mesh, record
from meshfold.mesh.model_io import DryRun, Operator
from meshfold.mesh.testing import fake_world
from meshfold.planner import Machine
from meshfold.planner.clock import Work
from meshfold.sequence import Mask, attention, sequence_sharding, work

PRECISION = "bf16"
PASSES = ("forward", "backward")
PRODUCTS = {"forward": 2, "backward": 5}
"""Matmuls of attention in a flash kernel."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An attention.

    Attributes:
        tokens: of the whole sequence.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: elements of a head.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int

    def operator(self, pairs: float, phase: str) -> Operator:
        """Return the attention of so many pairs of tokens, with all heads."""
        return Operator(round(2 * PRODUCTS[phase] * pairs * self.heads * self.head_dim), 0, self.head_dim)

    def ideal(self, ranks: int, machine: Machine, phase: str) -> float:
        """Return the seconds of an even share of the pairs, without anything else."""
        pairs = self.tokens * (self.tokens + 1) / 2 / ranks
        return Work(operators={self.operator(pairs, phase): 1}).seconds(machine, PRECISION)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A way to split a sequence.

    Attributes:
        ring: ranks around which keys and values travel.
        ulysses: ranks that exchange heads and tokens.
        order: of tokens over the ring: ``zigzag`` or ``contiguous``, the basic one.
    """

    ring: int
    ulysses: int
    order: str = "zigzag"

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.ring * self.ulysses

    @property
    def mode(self) -> str:
        """Our name of it."""
        return "ulysses" if self.ring == 1 else "ring" if self.ulysses == 1 else "ring_ulysses"

    @property
    def axes(self) -> dict[str, int]:
        """Axes of its mesh."""
        if self.mode == "ring_ulysses":
            return {"ring": self.ring, "ulysses": self.ulysses}
        return {"seq": self.ranks}


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a rank does in one pass.

    Attributes:
        work: attention and all operators beside it.
        ring_bytes: sent around the ring, beside the work.
        exchange_bytes: sent in all-to-alls, which the work waits for.
        calls: of both.
    """

    work: Work
    ring_bytes: float
    exchange_bytes: float
    calls: tuple[int, int]

    def seconds(self, machine: Machine) -> float:
        """Return its time: exchanges, then the longer of work and messages."""
        around, exchanges = (
            calls * machine.latency + size / machine.inside
            for calls, size in zip(self.calls, (self.ring_bytes, self.exchange_bytes), strict=True)
        )
        return exchanges + max(self.work.seconds(machine, PRECISION), around)


def count(problem: Problem, scheme: Scheme) -> dict[str, Counted]:
    """Run an attention forward and backward on the busiest rank's meta tensors; return what each pass does."""
    mesh = Mesh(scheme.axes, rank=0)
    sharding = sequence_sharding(problem.tokens, mesh, scheme.mode, scheme.order)
    mask = Mask(length=problem.tokens, causal=True)
    pairs = [work(sharding, mask, place) for place in range(sharding.ring)]
    busiest = pairs.index(max(pairs)) * scheme.ulysses
    found = {}
    with fake_world(scheme.ranks, busiest), DryRun() as stand_in:
        ranks = Mesh(scheme.axes)
        q, k, v = (
            torch.empty(
                (1, problem.tokens // scheme.ranks, heads, problem.head_dim),
                device="meta",
                dtype=torch.bfloat16,
                requires_grad=True,
            )
            for heads in (problem.heads, problem.kv_heads, problem.kv_heads)
        )
        out = torch.empty(0)
        for phase in PASSES:
            with Work.counted(stand_in) as counter, record() as log:
                if phase == "forward":
                    out = attention(q, k, v, mesh=ranks, mode=scheme.mode, causal=True, order=scheme.order)
                else:
                    out.backward(torch.empty_like(out))
            beside = {one: n for one, n in Work.of(counter).operators.items() if not one.flop}
            core = problem.operator(max(pairs) / scheme.ulysses, phase)
            sent = {kind: Fraction(0) for kind in ("shift", "all_to_all")} | {
                kind: size for (kind,), size in log.bytes_by("kind").items()
            }
            found[phase] = Counted(
                work=Work(operators={core: 1, **beside}),
                ring_bytes=float(sent["shift"]),
                exchange_bytes=float(sent["all_to_all"]),
                calls=(
                    sum(entry.kind == "shift" for entry in log.entries),
                    sum(entry.kind == "all_to_all" for entry in log.entries),
                ),
            )
        ranks.close()
    return found


def parts(ranks: int) -> list[Scheme]:
    """Return every way to split ranks into a ring and Ulysses' exchanges, the largest exchange first."""
    powers = [2**power for power in range(int(math.log2(ranks)) + 1)]
    return [Scheme(ring=ranks // each, ulysses=each) for each in reversed(powers)]
