"""The step of one chunk as a few runs of the kernel: now or later, whole or in halves, with timings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from meshfold.kernels import AdamSettings, AdamState, adam_step, adam_update_moments, adam_update_parameters
from meshfold.zero_gemini.memory.copies import Arrival
from meshfold.zero_gemini.optimizer.adam_state import Held
from meshfold.zero_gemini.optimizer.cpu_executor import Halves, Work
from meshfold.zero_gemini.optimizer.gpu_streaming import GpuStreaming


@dataclass
class Run:
    """Elements of a shard that are stepped with the same settings.

    Attributes:
        begin: the first.
        end: one past the last.
        settings: of all.
        number: of their step, from 1.
    """

    begin: int
    end: int
    settings: AdamSettings
    number: int

    @property
    def in_halves(self) -> bool:
        """Return True if parameters can be written before moments."""
        return self.settings.adamw_mode or not self.settings.weight_decay


@dataclass(frozen=True, kw_only=True)
class ChunkStep:
    """Step of one chunk that can be run at any time.

    Attributes:
        held: the chunk's state.
        gradient: of the chunk's shard.
        factor: of the gradient.
        first: global number of the shard's first element.
        seed: of stochastic rounding.
        runs: in order.
        timings: timings of steps in the host's memory are added here.
    """

    held: Held
    gradient: Tensor
    factor: float | Tensor
    first: int
    seed: int
    runs: list[Run]
    timings: StepTimer

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Ranges of elements that the runs cover."""
        return [(run.begin, run.end) for run in self.runs]

    def at_once(self) -> None:
        """Run the whole step now."""
        self._do(adam_step)

    @property
    def _elements(self) -> int:
        return sum(run.end - run.begin for run in self.runs)

    def _do_on_host(self, what: StepKind, kernel: Callable[..., None]) -> None:
        with self.timings.clock("disk" if self.held.place == "disk" else what, self._elements):
            self._do(kernel)

    def _do(self, kernel: Callable[..., None]) -> None:
        for index, begin, end, state in self.held.sections(self.spans, change=True, now=True):
            run = self.runs[index]
            kernel(
                state,
                self.gradient[begin:end],
                run.settings,
                step=run.number,
                grad_scale=self.factor,
                start=self.first + begin,
                seed=self.seed,
            )

    def in_one(self, ready: Work, between: Work) -> Halves:
        """Return the whole step as one part.

        Args:
            ready: returns when the gradient has arrived.
            between: called afterwards.
        """

        def work() -> None:
            ready()
            self._do_on_host("whole", adam_step)
            between()

        return Halves(work)

    def halves(self, between: Work, streaming: GpuStreaming | None = None) -> Halves:
        """Return the step in two halves where possible. State on disk is read and written once, so its step has one part.

        Args:
            between: called after each half.
            streaming: GPU streaming that may step it instead.
        """

        def then(what: StepKind, kernel: Callable[..., None]) -> None:
            self._do_on_host(what, kernel)
            between()

        if self.held.place == "disk":
            return Halves(partial(then, "whole", adam_step))
        through = None if streaming is None else partial(self._on_device, streaming)
        if not all(run.in_halves for run in self.runs):
            return Halves(partial(then, "whole", adam_step), on_device=through)
        first, second = (
            partial(then, "parameters", adam_update_parameters),
            partial(then, "moments", adam_update_moments),
        )
        return Halves(first, second, through, device_does_all=streaming is None or not streaming.halves)

    @property
    def is_of_all(self) -> bool:
        """Return True if the runs cover the whole shard."""
        ends = [0, *(run.end for run in self.runs)]
        return ends[:-1] == [run.begin for run in self.runs] and ends[-1] == self.gradient.numel() > 0

    def does_as(self, other: ChunkStep) -> bool:
        """Return True if another step of the same chunk would change the same elements to the same bits."""
        return self.runs == other.runs and float(self.factor) == float(other.factor)

    def speculative(self, ready: Arrival, wanted: Callable[[], bool], streaming: GpuStreaming | None = None) -> Halves:
        """Run the whole step into the shadow copy, which may become current; the runs must cover the whole shard.

        Args:
            ready: returns when the gradient has arrived.
            wanted: returns True while it may still be kept.
            streaming: GPU streaming that may step it instead.
        """

        def work() -> None:
            if not wanted():
                return
            ready()
            with self.timings.clock("second copy", self._elements):
                for run in self.runs:
                    before, into = self.held.both(run.begin, run.end)
                    adam_step(
                        into,
                        self.gradient[run.begin : run.end],
                        run.settings,
                        step=run.number,
                        grad_scale=self.factor,
                        start=self.first + run.begin,
                        seed=self.seed,
                        before=before,
                    )

        def through(streaming: GpuStreaming) -> Arrival:
            if not wanted():
                return Arrival()
            ready()
            return self._on_device(streaming, speculative=True)

        on_device = None if streaming is None else partial(through, streaming)
        return Halves(work, on_device=on_device, is_ready=lambda: not wanted() or ready.is_over())

    @torch.no_grad()
    def _on_device(self, streaming: GpuStreaming, *, speculative: bool = False) -> Arrival:
        """Start the step, or its first half, on the device (speculative: into the shadow copy); return a handle to wait for it."""
        first = streaming.halves and not speculative and all(run.in_halves for run in self.runs)
        kernel = adam_update_parameters if first else adam_step
        factor = float(self.factor)  # already on the host; reading a device tensor would wait for the device

        def piece(index: int, state: AdamState, gradient: Tensor, begin: int) -> None:
            run = self.runs[index]
            kernel(
                state,
                gradient,
                run.settings,
                step=run.number,
                grad_scale=factor,
                start=self.first + begin,
                seed=self.seed,
            )

        with self.timings.clock("GPU streaming", self._elements):  # ends when the last pieces are queued
            return streaming.step(
                self.held.in_memory(self.gradient),
                self.spans,
                piece,
                moments=not first,
                into=self.held.in_memory(self.gradient, second=True) if speculative else None,
            )


StepKind = Literal["whole", "parameters", "moments", "GPU streaming", "second copy", "disk"]
"""Kind of an optimizer step: whole, one of its halves (see :mod:`meshfold.zero_gemini.optimizer.cpu_executor`), by the
device, into a second copy of the state, or of state on a disk."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Elements and seconds of some optimizer steps.

    Attributes:
        elements: number stepped.
        seconds: total time, without waits for gradients, or for a disk other than their own.
    """

    elements: int = 0
    seconds: float = 0.0

    def __add__(self, other: StepTiming) -> StepTiming:
        return StepTiming(self.elements + other.elements, self.seconds + other.seconds)


class StepTimer:
    """Sum of the timings of several threads, by kind of step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[StepKind, StepTiming] = {}

    @contextmanager
    def clock(self, what: StepKind, elements: int) -> Iterator[None]:
        """Context manager: time a step of ``elements`` elements; a step that raises does not count."""
        begin = time.perf_counter()
        yield
        took = StepTiming(elements, time.perf_counter() - begin)
        with self._lock:
            self._found[what] = self._found.get(what, StepTiming()) + took

    def take(self) -> dict[StepKind, StepTiming]:
        """Return the timings since the last call."""
        with self._lock:
            found, self._found = self._found, {}
        return found
