"""The clock of every plan: seconds that the operators of a step take on a machine, under any spec.

Operators are counted once, on meta tensors (:class:`meshfold.mesh.model_io.OperatorCounter`), and timed for any machine. An
operator takes the longer of two times: its FLOP at the rate of matmuls, and the bytes that it reads and writes at the rate of
memory. The host launches operators one by one, and a faster device waits for it (:class:`Phases`). On a CPU the cores that launch
an operator also run it, so it takes both times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from meshfold.kernels import count_kernels, count_parts
from meshfold.mesh.model_io import FORWARD, DryRun, LiveBytes, Operator, OperatorCounter
from meshfold.mesh.recording import recorded_times
from meshfold.planner.efficiency import MATMULS
from meshfold.planner.machines import Machine

__all__ = ["MATMULS", "Phases", "Work", "kernels_of", "operator_seconds", "optimizer_seconds", "update_seconds"]

_OF_EXPERTS = "expert_places.placed"
"""The kernel that a layer of experts runs once in a forward."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Seconds of forwards and of their backwards: of a device that runs operators in sequence, and of the host that launches them.

    Attributes:
        forward: of the device.
        backward: the same.
        launched_forward: of the host.
        launched_backward: the same.
        runs: forwards, each followed by its backward.
    """

    forward: float
    backward: float
    launched_forward: float
    launched_backward: float
    runs: int = 1

    @property
    def device(self) -> float:
        """Seconds of the device if launching took no time."""
        return self.forward + self.backward

    @property
    def host(self) -> float:
        """Seconds of the host."""
        return self.launched_forward + self.launched_backward

    @property
    def longer(self) -> float:
        """Seconds of the device or of the host, whichever is longer, if the queue is never empty at the start."""
        return max(self.device, self.host)

    @property
    def idle(self) -> float:
        """Seconds in which the device has nothing to run, since the host has not launched it."""
        return self.seconds - self.device

    @property
    def seconds(self) -> float:
        """Seconds from the first launch to the end of the last operator.

        Operators queue: while the device is behind, the host goes ahead. Both begin together, so a run ends with the longest of:
        the device alone, the host alone, and a device that has waited for all launches of the forward.
        """
        first = max(self.longer, self.launched_forward + self.backward)
        return self.longer + (first - self.longer) / max(1, self.runs)

    def waiting(self, forward: float, backward: float) -> Phases:
        """Return the same with seconds of messages that the device waits for."""
        return replace(self, forward=self.forward + forward, backward=self.backward + backward)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of a rank's device in an optimizer step, without the step of the optimizer itself.

    Attributes:
        operators: each with its count.
        repeated_flop: of matmuls and attention that recomputation runs again.
        runs: forwards, each followed by its backward.
        units: of ``zero`` that all forwards enter.
    """

    operators: Mapping[Operator, int] = field(default_factory=dict)
    repeated_flop: int = 0
    runs: int = 1
    units: int = 0

    @classmethod
    @contextmanager
    def counted(
        cls, stand_in: DryRun, memory: LiveBytes | None = None, *, kind: str = "gpu"
    ) -> Iterator[OperatorCounter]:
        """Context manager: count operators on meta tensors. What one of our kernels does on a GPU counts as one operator.

        Args:
            stand_in: context in which the model's code runs.
            memory: counts the bytes that are alive; of a kernel only its arguments and results.
            kind: of the device: a CPU runs the operators of our kernels' references.
        """
        stand_in.on_gpu = kind == "gpu"
        with ExitStack() as stack:
            counter = stack.enter_context(stand_in.counting(OperatorCounter()))
            live = None if memory is None else stack.enter_context(memory)
            stack.enter_context(kernels_of(kind, counter, live))
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
        """Return its seconds on a machine."""
        return self.phases(machine, precision).seconds

    def phases(self, machine: Machine, precision: str) -> Phases:
        """Return its seconds on a machine by phase, of the device and of the host that launches its operators.

        On a CPU the device's have the launches, and the host's are 0.
        """
        spent, on_cpu = {True: 0.0, False: 0.0}, machine.kind == "cpu"  # after the forward, or in it
        launched = {True: 0.0, False: self.units * machine.launches.unit}
        for operator, count in self.operators.items():
            later = operator.phase != FORWARD
            spent[later] += count * operator_seconds(operator, machine, precision)
            launched[later] += 0.0 if on_cpu else count * machine.launches.of(operator)
            if operator.name == _OF_EXPERTS:  # one of each layer's forward
                launched[later] += count * machine.launches.experts_forward
                launched[True] += count * machine.launches.experts_backward * (operator.phase == FORWARD)
        if on_cpu:
            spent, launched = {later: spent[later] + launched[later] for later in spent}, dict.fromkeys(launched, 0.0)
        return Phases(
            forward=spent[False],
            backward=spent[True],
            launched_forward=launched[False],
            launched_backward=launched[True],
            runs=self.runs,
        )

    def __add__(self, other: Work) -> Work:
        return Work(
            operators=Counter(self.operators) + Counter(other.operators),
            repeated_flop=self.repeated_flop + other.repeated_flop,
            runs=max(1, self.runs * bool(self.operators) + other.runs * bool(other.operators)),
            units=self.units + other.units,
        )

    def minus(self, earlier: Work) -> Work:
        """Return the work counted since another."""
        found = Counter(self.operators)
        found.subtract(earlier.operators)
        return Work(
            operators={operator: count for operator, count in found.items() if count},
            repeated_flop=self.repeated_flop - earlier.repeated_flop,
            runs=self.runs,
            units=self.units - earlier.units,
        )

    def __mul__(self, times: int) -> Work:
        return Work(
            operators={operator: times * count for operator, count in self.operators.items()},
            repeated_flop=times * self.repeated_flop,
            runs=max(1, times * self.runs),
            units=times * self.units,
        )


def operator_seconds(operator: Operator, machine: Machine, precision: str) -> float:
    """Return the seconds of an operator on a machine: the longer of its FLOP and of the bytes that it reads and writes.

    One without FLOP also takes its start; shares of matmuls and of attention were measured with theirs. On a CPU all take their
    launch.
    """
    reached = machine.efficiency
    launch = machine.launches.of(operator) if machine.kind == "cpu" else 0.0
    moving = operator.bytes / (reached.of_memory(operator.name) * machine.memory_rate)
    if not operator.flop:
        return launch + moving + reached.start * bool(operator.bytes)
    if operator.head_dim:
        rate = machine.flops[precision]
        measured = machine.flops[machine.usual_precision]
        # The start and end of a query take the same seconds in every precision: as many keys' time more where keys are quicker.
        rate *= reached.matmuls * reached.of_attention(operator.head_dim, operator.keys, rate / measured)
    else:
        operands = "fp8" if operator.fp8 and "fp8" in machine.flops else precision
        rate = machine.flops[operands] * reached.of_matmul(operands, operator.flop, operator.side, operator.outputs)
    return launch + max(operator.computed * operator.flop / rate, moving)


@contextmanager
def kernels_of(kind: str, counter: OperatorCounter, live: LiveBytes | None = None) -> Iterator[None]:
    """Context manager: on meta tensors our kernels run as on a kind of device.

    Each is one operator, which has its arguments and results only: on a GPU those in Triton, on a CPU those in numba. The others
    run as the operators of their references. Of equal parts, such as the chunks of tokens of a loss, one runs and counts as all.
    """

    def repeats(parts: Sequence[Any]) -> Iterator[Any]:
        """Run the first part, which counts as all but the last one, and the last one, which may be smaller."""
        if len(parts) > 1:
            with counter.times(len(parts) - 1), recorded_times(len(parts) - 1):
                yield parts[0]
        yield from parts[-1:]

    with ExitStack() as stack:
        stack.enter_context(count_parts(repeats))
        counted = counter.as_one if live is None else lambda kernel: live.as_one(counter.as_one(kernel))
        stack.enter_context(count_kernels(counted, "cuda" if kind == "gpu" else "cpu"))
        yield


def optimizer_seconds(moved: int, machine: Machine) -> float:
    """Return the seconds of an optimizer step on a device that reads and writes ``moved`` bytes."""
    return moved / (machine.efficiency.optimizer * machine.memory_rate)


def update_seconds(moved: int, parameters: int, machine: Machine) -> tuple[float, float]:
    """Return the seconds of an optimizer step without ``zero``: of the device, and of the host that launches it.

    On a CPU the device's have the launches, and the host's are 0.

    Args:
        moved: bytes that the device reads and writes.
        parameters: that are stepped.
        machine: of the device.
    """
    device, host = optimizer_seconds(moved, machine), parameters * machine.launches.parameter
    return (device + host, 0.0) if machine.kind == "cpu" else (device, host)
