"""Measurements in training steps that memory plans are made from; all ranks agree on them.

Before there is a plan, unit by unit; under it, how long compute takes all in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshfold.engine.model.recompute import RecomputedBlocks
from meshfold.mesh.tracking import uncompiled
from meshfold.zero_gemini import Gemini
from meshfold.zero_gemini.optimizer import StepKind, StepTiming
from meshfold.zero_gemini.planner import typical_parts
from meshfold.zero_gemini.profiler import (
    CudaBytes,
    CudaClock,
    LiveBytes,
    PhaseClock,
    PhaseSeconds,
    StepTracer,
    Trace,
    WallClock,
    peak_of,
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured result of a plan.

    Attributes:
        seconds: of an optimizer step, from its first micro-step to its end: the median.
        gpu_bytes: most that tensors took on the device at once, gathered chunks and activations included; 0 on a CPU.
        host_bytes: most that the process had of the host's memory at the end of a step.
        host_steps: elements a second that the optimizer stepped on the host, by what was done (see
            :mod:`meshfold.zero_gemini.optimizer.kernel_runs`); empty for other optimizers than Adam.
    """

    seconds: float
    gpu_bytes: int
    host_bytes: int
    host_steps: Mapping[str, float]


class Watcher:
    """Traces the first micro-step of every optimizer step while it is on.

    Attributes:
        traces: so far.
        tokens: of the last forward that was traced.
        timings: of the optimizer's steps on the host, during the last step.
        times: of the steps whose time was taken.
    """

    def __init__(self, model: nn.Module, gemini: Gemini, device: torch.device, blocks: RecomputedBlocks | None) -> None:
        """Args:
        model: the trained model.
        gemini: holds it.
        device: where it computes.
        blocks: those whose activations a plan may keep.
        """
        self._model, self._gemini, self._device, self._blocks = model, gemini, device, blocks
        self.traces: list[Trace] = []
        self.tokens = 1
        self.timings: dict[StepKind, StepTiming] = {}
        self.times: list[PhaseSeconds] = []
        self._traced = False  # traced in this optimizer step
        self._tracer: StepTracer | None = None
        self._watch = ExitStack()
        clock = CudaClock(device) if device.type == "cuda" else WallClock()
        self._phases = PhaseClock(gemini.memory.waiting, clock, lambda: gemini.units_entered)

    def begin(self) -> None:
        """Watch the next forward, if nothing of this optimizer step was watched yet."""
        self.stop()
        if self._traced:
            return
        if self._device.type == "cuda":
            memory = CudaBytes(self._device, model_bytes=peak_of(self._gemini.memory.compute))
            tracer = StepTracer(self._model, memory=memory, clock=CudaClock(self._device))
        else:
            tracer = StepTracer(self._model, memory=LiveBytes(), clock=WallClock())
            # torch.compile, called under a mode that counts operations, would skip the code from then on.
            self._watch.enter_context(uncompiled())
        handle = self._model.register_forward_pre_hook(self._count_tokens, with_kwargs=True)
        self._watch.callback(handle.remove)
        if self._blocks is not None:
            self._watch.enter_context(self._blocks.watched(tracer.layers))
        self._watch.enter_context(self._gemini.memory.waiting.watched(tracer.waiting))
        self._tracer = self._watch.enter_context(tracer)

    def time(self) -> None:
        """Time the next forward and its backward, if it is the first of this optimizer step."""
        self.stop()
        if not self._traced:
            self._traced = True
            self._phases.begin()

    def turn(self) -> None:
        """Mark the end of a forward, before its backward."""
        self._phases.turn()

    @property
    def compute(self) -> PhaseSeconds | None:
        """The median of what forwards and backwards took; None if no time was taken."""
        if not self.times:
            return None
        return PhaseSeconds(
            median(x.forward for x in self.times),
            median(x.backward for x in self.times),
            typical_parts([x.parts for x in self.times]),
        )

    def end(self) -> None:
        """Record the end of the backward."""
        tracer = self._tracer
        self._phases.end()
        self.stop()
        if tracer is not None:
            self.traces.append(tracer.trace())
            self._traced = True

    def stop(self) -> None:
        """Stop watching."""
        self._tracer = None
        self._phases.stop()
        self._watch.close()

    def step_over(self) -> None:
        """Mark the end of an optimizer step."""
        self._traced = False
        self.timings = self._gemini.take_step_timings()
        if (took := self._phases.take()) is not None:
            self.times.append(took)

    def _count_tokens(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.tokens = max([1, *(x.numel() for x in given if not x.is_floating_point())])


def typical_timings(steps: Sequence[Mapping[StepKind, StepTiming]]) -> dict[StepKind, StepTiming]:
    """Return the host's optimizer steps of several training steps: all their elements, at the median of their paces."""
    found: dict[StepKind, StepTiming] = {}
    for what in dict.fromkeys(what for step in steps for what in step):
        there = [step[what] for step in steps if what in step and step[what].elements]
        elements = sum(timing.elements for timing in there)
        if elements:
            pace = median(timing.seconds / timing.elements for timing in there)
            found[what] = StepTiming(elements, pace * elements)
    return found
