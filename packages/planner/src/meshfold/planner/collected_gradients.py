"""Gradients on their way into chunks under ``zero``: each is copied to its place, often into wider numbers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meshfold.mesh.model_io import BACKWARD, Operator
from meshfold.mesh.spec import ZeroSpec
from meshfold.planner.machines import Machine
from meshfold.zero_gemini.planner import Regime

_SAME, _WIDER = "aten._foreach_copy", "grad_pass.write_gradient"


def moved_bytes(spec: ZeroSpec, regime: Regime, *, ranks: int, accumulation: int) -> float:
    """Return the bytes that a device reads and writes to put an element's gradient into its chunk.

    Chunks that copy engines push take gradients as they are. Where micro-steps are added up before a sum over ranks, the chunk is
    read, too.

    Args:
        spec: the entry.
        regime: bytes of an element.
        ranks: that share a chunk.
        accumulation: micro-steps of an optimizer step.
    """
    adds = accumulation > 1 and (spec.stage == 1 or ranks == 1)
    if spec.transport == "push" and ranks > 1 and not adds:
        return 0.0
    return regime.parameter + regime.gradient * (2 if adds else 1)


def copy_of(elements: float, each: float, regime: Regime) -> Operator:
    """Return the copy of so many elements, which moves ``each`` bytes of one, as an operator."""
    name = _SAME if regime.gradient == regime.parameter else _WIDER
    return Operator(0, bytes=round(elements * each), phase=BACKWARD, name=name)


def copy_seconds(elements: float, each: float, regime: Regime, machine: Machine, copies: int = 1) -> float:
    """Return the seconds of the same in so many copies on a machine."""
    one = copy_of(elements, each, regime)
    moving = one.bytes / (machine.efficiency.of_memory(one.name) * machine.memory_rate)
    return moving + copies * machine.efficiency.start * bool(one.bytes)


def taking(note: Callable[[Operator], None], each: float, regime: Regime) -> Callable[[Tensor], None]:
    """Return a hook of parameters that notes the copy of a gradient that has arrived, and drops it."""

    def arrive(parameter: Tensor) -> None:
        if each:
            note(copy_of(parameter.numel(), each, regime))
        release_gradient(parameter)

    return arrive


def release_gradient(parameter: Tensor) -> None:
    """Drop a gradient as soon as it has arrived, as chunks do."""
    parameter.grad = None
