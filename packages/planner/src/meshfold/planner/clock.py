"""The clock of every plan: seconds that the operators of a step take on a machine, under any spec.

Operators are counted once, on meta tensors (:class:`meshfold.mesh.model_io.OperatorCounter`), and timed for any machine. An
operator takes the longer of two times: its FLOP at the rate of matmuls, and the bytes that it reads and writes at the rate of
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from meshfold.kernels import count_kernels
from meshfold.mesh.model_io import DryRun, Operator, OperatorCounter
from meshfold.planner.machines import OPTIMIZER, Machine

MATMULS = 0.86
"""Fraction of one large matmul's rate that a model's matmuls reach in sequence (measured: OPT-6.7B on an H200)."""
_ATTENTION = {64: 0.58, 128: 0.70}
"""Size of a head: fraction of the matmuls' rate that attention reaches, forward and backward together. Only pairs that it
computes count (measured: cuDNN's on an H200, 4 × 4096 tokens, causal)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of a rank's device in an optimizer step, without the step of the optimizer itself.

    Attributes:
        operators: each with its count.
        repeated_flop: of matmuls and attention that recomputation runs again.
    """

    operators: Mapping[Operator, int] = field(default_factory=dict)
    repeated_flop: int = 0

    @classmethod
    @contextmanager
    def counted(cls, stand_in: DryRun) -> Iterator[OperatorCounter]:
        """Context manager: count operators on meta tensors. What one of our kernels does on a GPU counts as one operator."""
        with stand_in.counting(OperatorCounter()) as counter, count_kernels(counter.as_one):
            yield counter

    @classmethod
    def of(cls, counted: OperatorCounter) -> Work:
        """Return what was counted."""
        return cls(operators=dict(counted.counts), repeated_flop=counted.repeated_flop)

    @property
    def flop(self) -> int:
        """Floating-point operations of matmuls and attention."""
        return sum(count * operator.flop for operator, count in self.operators.items())

    def seconds(self, machine: Machine, precision: str) -> float:
        """Return its seconds on a machine: the operators in sequence, or the host's launches if they take longer."""
        matmuls = MATMULS * machine.flops[precision]
        in_turn = launches = 0.0
        for operator, count in self.operators.items():
            rate = matmuls * (attention_share(operator.head_dim) if operator.head_dim else 1.0)
            in_turn += count * max(operator.computed * operator.flop / rate, operator.bytes / machine.memory_rate)
            launches += count * machine.launch
        return max(in_turn, launches)

    def __add__(self, other: Work) -> Work:
        return Work(
            operators=Counter(self.operators) + Counter(other.operators),
            repeated_flop=self.repeated_flop + other.repeated_flop,
        )

    def __mul__(self, times: int) -> Work:
        return Work(
            operators={operator: times * count for operator, count in self.operators.items()},
            repeated_flop=times * self.repeated_flop,
        )


def attention_share(head_dim: int) -> float:
    """Return the fraction of the matmuls' rate that attention with heads of this size reaches."""
    return _ATTENTION[min(_ATTENTION, key=lambda size: abs(size - head_dim))]


def optimizer_seconds(moved: int, machine: Machine) -> float:
    """Return the seconds of an optimizer step on a device that reads and writes ``moved`` bytes."""
    return moved / (OPTIMIZER * machine.memory_rate)
