"""Shares of a machine's rates that the operators of a model reach, and the links that its collectives reach."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshfold.mesh.model_io import BACKWARD, Operator

MATMULS = 0.86
"""Share of one large matmul's rate that a model's matmuls reach in sequence (measured: OPT-6.7B on an H200)."""
OPTIMIZER = 0.82
"""Share of the rate of a plain copy that a fused optimizer step reaches (H200: 3.47 of 4.24 TB/s)."""
ATTENTION: Mapping[int, float] = {64: 0.58, 128: 0.70}
"""By the size of a head, the share of the matmuls' rate that attention reaches, forward and backward together. Only computed
pairs count (measured: cuDNN's on an H200, 4 × 4096 tokens, causal)."""

IN_PLACE: Mapping[str, float] = {"cross_entropy.write_losses_and_gradient": 0.30}
"""By the name that plans count them with, the share of the memory's rate that kernels reach which rewrite their argument: it is
read, computed with and written, and its bytes count once (measured: logits of 16,384 × 50,257 in bf16 on an H100)."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of a machine's rates that operators reach. The defaults are those of data centre GPUs.

    Attributes:
        matmuls: share of ``flops`` that large matmuls reach one after the other.
        by_flop: by precision, pairs of a matmul's FLOP and the share of ``matmuls`` that matmuls of that size reach, by rising
            FLOP; without an entry all reach the whole.
        by_side: by precision, pairs of a product's smallest side and the share of ``matmuls`` that large products of that side
            reach, by rising side: each tile has a start and an end, even with few terms. Without an entry all reach the whole.
        by_output: by precision, pairs of the elements of a product's result and the share of ``matmuls`` that products of many
            terms reach, by rising elements: few tiles leave processors idle, as in a narrow layer's weight gradient.
        attention: size of a head to the share of the matmuls' rate that attention of long sequences reaches.
        lag: size of a head to the start and end of a query, measured in keys: with that many keys a query, attention reaches half
            of its share. Without an entry 0.
        elementwise: share of ``memory_rate`` that operators without matmuls reach.
        by_name: the same of operators that were measured, by the name that plans count them with. Without an entry those of
            :data:`IN_PLACE` have theirs.
        optimizer: share of ``memory_rate`` that the step of the optimizer reaches.
        start: seconds from an operator's end to the next one's work, where a queue is full: a device takes them for every operator
            without matmuls, however small. 0: not measured.
        hidden: share of a collective inside a node that matmuls hide while both run: they share cores, memory and power. 1: all
            of it.
        hidden_by_kind: the same of kinds of collectives that were measured.
    """

    matmuls: float = MATMULS
    by_flop: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    by_side: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    by_output: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    attention: Mapping[int, float] = field(default_factory=lambda: dict(ATTENTION))
    lag: Mapping[int, float] = field(default_factory=dict)
    elementwise: float = 1.0
    by_name: Mapping[str, float] = field(default_factory=dict)
    optimizer: float = OPTIMIZER
    start: float = 0.0
    hidden: float = 1.0
    hidden_by_kind: Mapping[str, float] = field(default_factory=dict)

    def of_matmul(self, precision: str, flop: float, side: int = 0, outputs: int = 0) -> float:
        """Return the share of ``flops`` that a matmul reaches: the least that its sizes allow.

        Args:
            precision: of its operands.
            flop: floating-point operations.
            side: the smallest; 0: unknown.
            outputs: elements of its result; 0: unknown.
        """
        known = [(self.by_flop, flop), (self.by_side, side), (self.by_output, outputs)]
        return self.matmuls * min(
            _share_at(table.get(precision, ()), size) for table, size in known if size or table is self.by_flop
        )

    def of_attention(self, head_dim: int, keys: int = 0, pace: float = 1.0) -> float:
        """Return the share of the matmuls' rate that attention reaches, by the nearest known size of a head.

        Args:
            head_dim: size of a head.
            keys: that a query is computed with, on average; 0: many.
            pace: ratio of its matmuls' rate to that of the machine's usual precision, for which ``lag`` was measured.
        """
        share = self.attention[min(self.attention, key=lambda size: abs(size - head_dim))]
        if not self.lag or not keys:
            return share
        lag = self.lag[min(self.lag, key=lambda size: abs(size - head_dim))]
        return share * keys / (keys + pace * lag)

    def of_memory(self, name: str) -> float:
        """Return the share of ``memory_rate`` that an operator of a name reaches."""
        return self.by_name.get(name, IN_PLACE.get(name, self.elementwise))

    def shown_of(self, kind: str) -> float:
        """Return the share of a collective inside a node that matmuls do not hide."""
        return 1.0 - self.hidden_by_kind.get(kind, self.hidden)


def _share_at(table: tuple[tuple[float, float], ...], size: float) -> float:
    """Return the share for a size: interpolated by the size's logarithm, beyond the ends the nearest; 1 without pairs."""
    if not table or size >= table[-1][0]:
        return table[-1][1] if table else 1.0
    upper = bisect_left(table, size, key=lambda pair: pair[0])
    if upper == 0:
        return table[0][1]
    (low, before), (high, after) = table[upper - 1], table[upper]
    return before + math.log(size / low) / math.log(high / low) * (after - before)


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Seconds that a host needs to launch what a device runs, with the Python around it.

    Defaults are those of a quick host, between an H200's (9 µs for the smallest operator from Python, 5 in a backward) and what
    an H100's took for operators of whole models (100 µs, 40 in a backward).

    Attributes:
        forward: of an operator in a forward, and in one that recomputation runs again.
        backward: of an operator in a backward, which autograd launches.
        kernel_forward: of one of our kernels in a forward.
        kernel_backward: the same in a backward.
        parameter: of a parameter in the optimizer's step: its gradient's norm, its scale and its update.
        residual: of a residual sum that waits for the norm which computes it, beyond the norm's kernel: the Python around its
            block. 0: not measured; files from before then have it in ``kernel_forward``.
        experts_forward: of a layer of experts in a forward, beyond its operators and kernels: the Python that routes and sorts
            tokens. 0: not measured.
        experts_backward: the same in a backward.
        unit: of a unit of ``zero`` that a forward enters: the hooks that gather its chunks and watch for its backward. 0: not
            measured.
    """

    forward: float = 2e-5
    backward: float = 1e-5
    kernel_forward: float = 4e-5
    kernel_backward: float = 4e-5
    parameter: float = 1e-5
    residual: float = 0.0
    experts_forward: float = 0.0
    experts_backward: float = 0.0
    unit: float = 0.0

    @classmethod
    def of_all(cls, seconds: float) -> Launches:
        """Return launches that take the same for all operators."""
        return cls(forward=seconds, backward=seconds, kernel_forward=seconds, kernel_backward=seconds, parameter=0.0)

    def of(self, operator: Operator) -> float:
        """Return the seconds for an operator."""
        if operator.phase == BACKWARD:
            return self.kernel_backward if operator.ours else self.backward
        kernel = self.kernel_forward + self.residual * operator.residual
        return kernel if operator.ours else self.forward


@dataclass(frozen=True, kw_only=True)
class Link:
    """A collective's cost: by sizes where they were measured, else by α–β.

    α–β is ``latency`` seconds a call, and ``rate`` bytes a second that a rank sends by the ring count. It overestimates the rate of
    mid-sized messages, for which libraries change the algorithm.

    Attributes:
        latency: seconds of the smallest call.
        rate: bytes a second.
        error: largest relative error for sizes that the fit has not seen; nan if it was not measured.
        by_size: pairs of a call's bytes and seconds, both rising; fewer than two: α–β.
    """

    latency: float
    rate: float
    error: float = math.nan
    by_size: tuple[tuple[float, float], ...] = ()

    def seconds(self, sent: float, calls: int = 1) -> float:
        """Return the seconds of some calls that together send ``sent`` bytes."""
        if len(self.by_size) < 2 or calls < 1:
            return calls * self.latency + sent / self.rate
        return calls * self._of_call(sent / calls)

    def _of_call(self, sent: float) -> float:
        """Return the seconds of a call: interpolated between measured sizes; below all, the smallest's; above, extrapolated."""
        if sent <= self.by_size[0][0]:
            return self.by_size[0][1]
        upper = min(bisect_left(self.by_size, sent, key=lambda pair: pair[0]), len(self.by_size) - 1)
        (low, before), (high, after) = self.by_size[upper - 1], self.by_size[upper]
        return before + (after - before) * (sent - low) / (high - low)
