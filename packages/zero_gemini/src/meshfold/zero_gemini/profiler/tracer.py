"""Tracer of one micro-step, unit by unit.

A unit is *reached*, then *entered*, and *left*. In between the first two, the hooks that gather parameters wait for them. Hooks on
its module mark these timesteps in forward, hooks on its outputs and inputs in backward. The runtime gathers and releases at the
same points: timesteps of a trace are timesteps of the executor.

Time in which the host waits within a timestep (:mod:`meshfold.zero_gemini.memory.copies`) is subtracted. A plan then depends on the
model's needs, and not on the placement of chunks during the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import SpecError
from meshfold.zero_gemini.profiler.clocks import Clock
from meshfold.zero_gemini.profiler.layers import Alive, LayerWatch
from meshfold.zero_gemini.profiler.live import MemoryProbe
from meshfold.zero_gemini.profiler.trace import Trace, TracedTimestep
from meshfold.zero_gemini.runtime.gradient_arrival import watch_inputs, watch_output
from meshfold.zero_gemini.runtime.outside_calls import After, Before, watch_outside
from meshfold.zero_gemini.runtime.units import Unit, find_units


class StepTracer:
    """Records one micro-step, forward and backward, while it is entered.

    Hooks that gather parameters must already be on the model: the tracer puts its own around them.

    Attributes:
        layers: recorder of layers whose activations are recomputed, for the code that recomputes them.
    """

    def __init__(
        self, model: nn.Module, *, memory: MemoryProbe, clock: Clock, units: Sequence[Unit] | None = None
    ) -> None:
        """Args:
        model: to be run.
        memory: counts bytes; entered and left with the tracer.
        clock: measures seconds; entered and left with the tracer.
        units: of the model; by default ``find_units``'s.
        """
        self._units = find_units(model) if units is None else list(units)
        self._memory, self._clock = memory, clock
        self._steps = _Timesteps(memory)
        self._seen = self._steps.seen
        self._inside: dict[Unit, _Seen] = {}
        self._in_backward = False
        self._arrived: Any = None
        self._arriving = False  # between reaching a unit and entering it
        self._stack = ExitStack()
        self.layers = LayerWatch(
            clock=clock, place=self._steps.place, look=self._steps.look, round_bytes=memory.round_bytes
        )

    def __enter__(self) -> StepTracer:
        for unit in self._units:
            module = unit.module
            # A compiled module would trace its hooks, and the graph would replay the marks of one step. Keep them eager.
            eager: Callable[..., Any] = torch.compiler.disable
            handles: tuple[Any, ...] = (
                module.register_forward_pre_hook(eager(self._before(unit, self._arrive)), prepend=True),
                module.register_forward_pre_hook(eager(self._before(unit, self._enter_forward))),
                module.register_forward_pre_hook(eager(self._watch_inputs(unit)), with_kwargs=True),
                module.register_forward_hook(eager(self._after(unit, self._arrive)), prepend=True),
                module.register_forward_hook(eager(self._after(unit, self._enter))),
                module.register_forward_hook(eager(self._leave_forward(unit))),
                watch_outside(unit, self._arrive_outside(unit), self._after(unit, self._arrive), prepend=True),
                watch_outside(unit, self._enter_outside(unit), self._after_outside(unit)),
            )
            for handle in handles:
                self._stack.callback(handle.remove)
        self._stack.enter_context(self._memory)
        self._stack.enter_context(self._clock)
        self._start = self._clock.mark()
        return self

    def __exit__(self, *error: object) -> None:
        self._steps.end()
        self._stop = self._clock.mark()
        self._stack.close()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Context manager around waits of the host: waits that are not before the entry of a unit count as stalled.

        Args:
            what: description of the wait, unused here.
        """
        if self._arriving or not self._seen:
            yield
            return
        begin = self._clock.mark()
        try:
            yield
        finally:
            self._seen[-1].stalls.append((begin, self._clock.mark()))

    def trace(self) -> Trace:
        """Return the trace.

        Raises:
            SpecError: if no backward was run.
        """
        if not any(seen.backward for seen in self._seen):
            raise SpecError(
                f"{len(self._seen)} units were entered while the tracer watched, none of them in a backward: run the model "
                "and its loss's backward inside of `with tracer`"
            )
        return Trace(timesteps=tuple(self._timestep(i) for i in range(len(self._seen))), layers=self.layers.layers())

    # -- hooks --------------------------------------------------------------------------------------------------

    def _before(self, unit: Unit, act: Callable[[Unit], None]) -> Callable[[nn.Module, Any], None]:
        def before(module: nn.Module, args: Any) -> None:
            act(unit)

        return before

    def _watch_inputs(self, unit: Unit) -> Callable[..., Any]:
        """Return a hook before a unit's forward that leaves the unit once the gradients of its inputs have arrived."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return watch_inputs(args, kwargs, lambda: self._leave(unit))

        return before

    def _after(self, unit: Unit, act: Callable[[Unit], None]) -> Callable[..., None]:
        """Return a hook after a unit's forward that calls ``act`` once, before the backward of this call."""

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_repeated(unit) or not torch.is_grad_enabled():
                return
            done = False

            def first(gradient: Tensor) -> None:
                nonlocal done
                if not done:
                    done = self._in_backward = True
                    act(unit)

            watch_output(output, first)

        return after

    def _leave_forward(self, unit: Unit) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not self._is_repeated(unit):
                self._leave(unit)

        return after

    # A submodule that is called from outside of its unit: as a call of the unit.

    def _arrive_outside(self, unit: Unit) -> Before:
        return lambda module, args, kwargs: self._arrive(unit)

    def _enter_outside(self, unit: Unit) -> Before:
        watch = self._watch_inputs(unit)

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._enter(unit, by_forward=True)
            return None if self._is_repeated(unit) else watch(module, args, kwargs)

        return before

    def _after_outside(self, unit: Unit) -> After:
        hooks = (self._after(unit, self._enter), self._leave_forward(unit))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            for hook in hooks:
                hook(module, args, output)

        return after

    def _is_repeated(self, unit: Unit) -> bool:
        """Return True if the forward that ends is a recomputation in the unit's own backward."""
        seen = self._inside.get(unit)
        return seen is not None and not seen.by_forward

    # -- what is recorded ---------------------------------------------------------------------------------------

    def _arrive(self, unit: Unit) -> None:
        if unit not in self._inside:
            self._arrived = self._clock.mark()
            self._arriving = True

    def _enter_forward(self, unit: Unit) -> None:
        self._enter(unit, by_forward=True)

    def _enter(self, unit: Unit, *, by_forward: bool = False) -> None:
        if unit in self._inside:
            return
        self._arriving = False
        self._steps.end()
        seen = _Seen(
            unit=unit.name,
            backward=self._in_backward,
            by_forward=by_forward,
            arrived=self._arrived,
            entered=self._clock.mark(),
        )
        self._inside[unit] = seen
        self._seen.append(seen)

    def _leave(self, unit: Unit) -> None:
        seen = self._inside.pop(unit, None)
        if seen is not None:
            seen.until = len(self._seen) - 1

    def _timestep(self, i: int) -> TracedTimestep:
        seen, seconds = self._seen[i], self._clock.seconds
        last = len(self._seen) - 1
        begin = self._start if i == 0 else seen.entered
        end = self._stop if i == last else self._seen[i + 1].arrived
        waited = seconds(seen.arrived, seen.entered)
        stalled = sum(seconds(*stall) for stall in seen.stalls)
        spent = seconds(begin, end) - stalled - (waited if i == 0 else 0.0)
        return TracedTimestep(
            unit=seen.unit,
            backward=seen.backward,
            until=last if seen.until is None else seen.until,
            non_model_bytes=seen.peak,
            left_bytes=seen.now,
            seconds=max(0.0, spent),
            waited_seconds=waited,
            stalled_seconds=stalled,
        )


class _Timesteps:
    """The timesteps so far.

    Attributes:
        seen: all of them, in order; the last is the current one.
    """

    def __init__(self, memory: MemoryProbe) -> None:
        """``memory``: counts bytes."""
        self.seen: list[_Seen] = []
        self._memory = memory
        self._most = 0  # peak bytes since the current timestep began; the first includes what was before

    def place(self) -> int:
        """Return the number of the current timestep."""
        return max(0, len(self.seen) - 1)

    def look(self) -> Alive:
        """Return the bytes that are alive in the current timestep."""
        peak, now = self._memory.take()
        self._most = max(self._most, peak)
        return Alive(most=self._most, since=peak, now=now)

    def end(self) -> None:
        """End the current timestep, or the time before the first."""
        peak, now = self._memory.take()
        self._most = max(self._most, peak)
        if self.seen:
            last = self.seen[-1]
            last.peak, last.now = self._most, now
            self._most = 0


@dataclass(kw_only=True, slots=True)
class _Seen:
    """Timestep that is being recorded."""

    unit: str
    backward: bool
    by_forward: bool  # entered before a forward, not before a backward
    arrived: Any
    entered: Any
    until: int | None = None
    peak: int = 0
    now: int = 0
    stalls: list[tuple[Any, Any]] = field(default_factory=list)
