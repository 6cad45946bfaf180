"""Gathering and releasing while a model runs: hooks on its units and on the autograd graph.

A unit is *entered* before its forward and, through a hook on its output, before its backward. It is *left* after its forward, and
when the gradients of its inputs exist. Entering gathers its chunks, and starts to gather the chunks of the unit that came next in
the last step. Chunks that no entered unit needs are then released. Each step learns the order of units for the next. A step
with another order gathers later than possible, but its results are right. A call of a submodule from outside of its unit counts as
a call of the unit (:mod:`~meshfold.zero_gemini.runtime.outside_calls`).

:mod:`~meshfold.zero_gemini.runtime.open_calls` counts how often each unit is called and left again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.fp8_gather import Operands
from meshfold.zero_gemini.prefetch import reach, reaches, timesteps_of
from meshfold.zero_gemini.runtime.captured_moves import CapturedMoves
from meshfold.zero_gemini.runtime.gather_cache import GatherCache
from meshfold.zero_gemini.runtime.gradient_arrival import watch_inputs, watch_output
from meshfold.zero_gemini.runtime.open_calls import OpenCalls, graph_task
from meshfold.zero_gemini.runtime.outside_calls import Before, watch_outside
from meshfold.zero_gemini.runtime.units import Unit


class Runtime:
    """Hooks that keep the chunks of current and coming units gathered.

    Attributes:
        order: names of the units entered by the last step that was trained, forward and backward.
        gather_cache: chooses the chunks that stay between two uses.
        is_quiet: hooks do nothing.
        capture: captures what the hooks do; None if they only do it.
        needs_memory: called before a forward of the model that is not captured, and with True before chunks move; None: nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: OpenCalls,
        *,
        prefetch: int,
        light: Collection[Unit] = (),
        steps_in_background: Callable[[Chunk], bool] = lambda chunk: False,
        before_evaluation: Callable[[], None] | None = None,
        check_forward: Callable[[], None] | None = None,
        on_entered: Callable[[], None] | None = None,
        on_left: Callable[[], None] | None = None,
        recomputes: Callable[[str], bool] = lambda unit: False,
    ) -> None:
        """Args:
        model: the whole model; its forward begins and ends evaluation without gradients.
        calls: has its units with their chunks, and records each call of one.
        prefetch: number of units that are gathered ahead.
        light: units that ``prefetch`` does not count (:mod:`meshfold.zero_gemini.prefetch`).
        steps_in_background: returns True if the optimizer steps a chunk in parallel with compute; asked again by ``reread``.
        before_evaluation: called before a forward without gradients while steps are pending, since its result is read
            before the ranks agree again on errors. None: nothing.
        check_forward: called before each forward of the model; raises if none is allowed. None: nothing.
        on_entered: called when a unit is entered in training, before its chunks are gathered. None: nothing.
        on_left: called in a backward whenever a unit was left for the last time. None: nothing.
        recomputes: returns True if a unit of this name repeats its forward in its backward.
        """
        self._calls, self._on_entered, self._on_left, self._check_forward = calls, on_entered, on_left, check_forward
        self._recomputes = recomputes
        self._chunks: dict[Unit, list[Chunk]] = {}
        self._steps_in_background = steps_in_background
        self.reread()
        self._prefetch, self._light = prefetch, light
        self._before_evaluation = before_evaluation
        self._inside: list[Unit] = []  # entered, not yet left
        self._reads: dict[Unit, Operands] = {}  # what is read of the chunks of entered units
        self._called_again: set[Unit] = set()  # units that have been called in a backward, and will be again
        self._behind: set[Unit] = set()  # units whose backward has begun
        self._recomputed: set[Unit] = set()  # recomputed units whose backward has not begun
        self._backwards = 0
        self._unfinished: dict[Unit, None] = {}  # forwards left by an exception, as pipeline stages do
        self._planned: tuple[Sequence[str], Sequence[int]] = ((), ())
        self._reaches: Sequence[int] | None = None  # units that are gathered ahead at each place; None: by count
        self.gather_cache = GatherCache()
        self.is_quiet = False
        self.capture: CapturedMoves | None = None
        self._replayed: CapturedMoves | None = None
        self.needs_memory: Callable[[bool], None] | None = None
        self._held: dict[Chunk, None] = {}  # gathered, or being gathered
        self._in_backward = False
        self.order: list[Unit] = []
        self._seen: list[Unit] = []
        self._turn, self._seen_forward = 0, 0  # number of units that the last step, and this one, entered in forward
        self._handles: list[Any] = [
            model.register_forward_pre_hook(torch.compiler.disable(self._start)),
            model.register_forward_hook(torch.compiler.disable(self._end), always_call=True),
        ]
        for unit, chunks in calls.chunks_of.items():
            if chunks:
                before, after = self._before(unit), self._after(unit)
                self._handles += [
                    unit.module.register_forward_pre_hook(before, with_kwargs=True),
                    unit.module.register_forward_hook(after),
                    watch_outside(unit, self._unless_behind(unit, before), after),
                ]

    @property
    def place(self) -> int:
        """Number of units that this step has entered, in forward and in backward."""
        return len(self._seen)

    @contextmanager
    def replaying(self, captured: CapturedMoves) -> Iterator[None]:
        """Context manager: inside, :attr:`entered` is that of a replay, in which no hook runs."""
        self._replayed = captured
        try:
            yield
        finally:
            self._replayed = None

    @property
    def entered(self) -> int:
        """Number of units that this step has entered, in forward and in backward, also in a replay."""
        return self.place if self._replayed is None else self._replayed.place

    def computes_since(self, place: int) -> bool:
        """Return True if a unit that is not light was entered since a place, and another one after it."""
        return any(unit not in self._light for unit in islice(self._seen, place, max(0, len(self._seen) - 1)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()  # some have the hooks, which call this
        self._on_entered = None

    def reread(self) -> None:
        """Find the chunks that are not resident or may have a pending step. Call it after chunks were moved."""
        self._chunks = {
            unit: [c for c in all_ if not c.resident or self._steps_in_background(c)]
            for unit, all_ in self._calls.chunks_of.items()
        }

    def gathers_first(self) -> dict[Chunk, Operands]:
        """Return the chunks that a step with this order gathers at its first unit, with the operands that it reads."""
        coming = [*islice(self._seen, 1, None)]
        last = 1 + reach((unit in self._light for unit in coming), self._prefetch)
        return self._read((unit, Operands.FORWARD) for unit in self._seen[:last])

    def gather_ahead(self, chunk: Chunk, operands: Operands) -> None:
        """Start gathering a chunk for the next step; it is released again if that begins with other units."""
        chunk.gather(operands)
        self._held[chunk] = None

    def gather_by(self, units: Sequence[str], ready: Sequence[int]) -> None:
        """Gather ahead as a plan says, in steps with its order of units; in other steps, and without units, by count.

        Args:
            units: name of the unit of each timestep.
            ready: for each timestep the one from which its unit is gathered.
        """
        self._planned = (units, ready)
        self._use_plan()

    def _use_plan(self) -> None:
        units, ready = self._planned
        timesteps = timesteps_of((unit.name for unit in self.order), units) if units else None
        self._reaches = None if timesteps is None else reaches(ready, timesteps)

    def begin_step(self) -> None:
        """Expect the units of the last step in the same order. Call it before each training step."""
        if self._seen:
            self.order, self._seen = self._seen, []
            self._turn = self._seen_forward
            self._use_plan()
            self.gather_cache.learn([self._chunks[unit] for unit in self.order])
        self.unlearn()

    def unlearn(self) -> None:
        """Forget the units that were entered since the step began."""
        self._seen.clear()
        self._seen_forward = 0
        self._unfinished.clear()
        self._calls.clear()

    def abandon(self) -> None:
        """Forget a step that raised in the middle."""
        self._in_backward = False
        self._behind.clear()
        self._seen.clear()
        self.rest()

    def rest(self) -> None:
        """Release everything."""
        self._release([*self._held])
        self._inside.clear()
        self._recomputed.clear()

    def _release(self, chunks: Sequence[Chunk]) -> None:
        if self.capture is not None:
            self.capture.leave(chunks)
        for chunk in chunks:
            chunk.release()
            del self._held[chunk]

    # -- hooks --------------------------------------------------------------------------------------------------

    def _start(self, module: nn.Module, args: Any) -> None:
        if self.is_quiet:
            return
        if self.needs_memory is not None and self.capture is None:
            self.needs_memory(False)
        if self._check_forward is not None and graph_task() < 0:  # skipped for recomputation
            self._check_forward()
        if not self._in_backward:  # an earlier forward that raised may not have left its units
            self._unfinished.update(dict.fromkeys(self._inside))
            self._inside.clear()
            self._recomputed.clear()
        if self._before_evaluation is None or torch.is_grad_enabled():
            return
        if any(chunk.step_is_pending for chunks in self._chunks.values() for chunk in chunks):
            self._before_evaluation()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() and not self.is_quiet:
            self.rest()

    def _before(self, unit: Unit) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.is_quiet:
                return None
            if graph_task() >= 0:
                self._called_again.add(unit)
            self._enter(unit, Operands.FORWARD)
            return watch_inputs(args, kwargs, self._call(unit, args, kwargs))

        # Hooks of a compiled block run outside its graph.
        found: Callable[..., Any] = torch.compiler.disable(before)
        return found

    def _after(self, unit: Unit) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self.is_quiet:
                return
            if unit in self._behind:  # recomputed on its own: its backward follows at once
                return
            if graph_task() >= 0:  # recomputed with others: keep its parameters until its backward
                self._recomputed.add(unit)
            elif unit in self._inside:
                self._inside.remove(unit)
            if torch.is_grad_enabled():
                watch_output(output, self._before_backward(unit))

        found: Callable[..., Any] = torch.compiler.disable(after)
        return found

    def _unless_behind(self, unit: Unit, before: Before) -> Before:
        """Return a hook for calls of a unit's submodules from outside, not for recomputation in the unit's own backward."""
        return lambda module, args, kwargs: None if unit in self._behind else before(module, args, kwargs)

    def _before_backward(self, unit: Unit) -> Callable[[Tensor], None]:
        """Return the hook of one call; a unit that is called twice is entered and left twice."""
        begun = 0  # number of the backward that called this hook

        def before_backward(gradient: Tensor) -> None:
            nonlocal begun
            if not self._in_backward:
                self._in_backward = True
                self._calls.begin_backward()
                self._backwards += 1
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
                # Units whose forward did not finish may need their parameters at any time in backward.
                self._unfinished.update(dict.fromkeys(self._inside))
                for left in self._unfinished:
                    self._enter(left, Operands.BOTH, again=True)
            if begun != self._backwards:
                begun = self._backwards
                self._behind.add(unit)
                if unit in self._recomputed:
                    self._recomputed.remove(unit)
                    self._inside.remove(unit)
                self._enter(unit, self._read_in_backward(unit), again=True)

        return before_backward

    def _call(self, unit: Unit, args: Any, kwargs: Any) -> Callable[[], None]:
        """Count a call of a unit; return the function to call when backward leaves it."""
        is_open = self._calls.enter(unit, args, kwargs)

        def left() -> None:
            nonlocal is_open
            if unit in self._inside:
                self._inside.remove(unit)
            if is_open:
                is_open = False
                if self._calls.leave(unit) and self._on_left is not None:
                    self._on_left()

        return left

    def _after_backward(self) -> None:
        self._in_backward = False
        self._behind.clear()
        self._inside.clear()
        self._recomputed.clear()
        self._release(self._evicted(self._held))

    # -- what is held -------------------------------------------------------------------------------------------

    def _read_in_backward(self, unit: Unit) -> Operands:
        """Return the operands that a unit's backward reads: a recomputed unit's backward also reads its forward's."""
        again = unit in self._called_again or self._recomputes(unit.name)
        return Operands.BOTH if again else Operands.BACKWARD

    def _enter(self, unit: Unit, operands: Operands, *, again: bool = False) -> None:
        self._reads[unit] = (self._reads[unit] | operands) if unit in self._inside else operands
        if again or unit not in self._inside:
            self._inside.append(unit)
            if torch.is_grad_enabled() or self._in_backward:
                self._seen.append(unit)
                self._seen_forward += not self._in_backward
            if self._on_entered is not None:
                self._on_entered()
        wanted = self._read((inside, self._reads[inside]) for inside in self._inside)
        ahead = self._read(self._next()) if self._expects(unit) else {}
        self._release(self._evicted(chunk for chunk in self._held if chunk not in wanted and chunk not in ahead))
        if self.capture is not None:  # no step is pending now
            cut = unit not in self._light
            gathered = self.capture.enter(wanted, ahead, self._chunks[unit], place=self.place, cut=cut)
            self._held.update(dict.fromkeys(gathered))
            return
        for chunk, read in wanted.items():
            if chunk.step_is_pending and chunk not in self._chunks[unit]:
                continue  # stepped in this backward: no entered unit reads it again
            chunk.gather(read)
            self._held[chunk] = None
        for chunk, read in ahead.items():
            # Do not prefetch a chunk whose step is pending: waiting for it would delay this unit.
            if chunk.can_gather_early:
                chunk.gather(read)
                self._held[chunk] = None
        for chunk in self._chunks[unit]:
            chunk.wait()

    def _read(self, units: Iterable[tuple[Unit, Operands]]) -> dict[Chunk, Operands]:
        """Return the chunks of units, with the operands that any of them reads."""
        found: dict[Chunk, Operands] = {}
        for unit, operands in units:
            for chunk in self._chunks[unit]:
                found[chunk] = found.get(chunk, Operands(0)) | operands
        return found

    def _evicted(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Return which of the chunks that no entered unit needs should be released."""
        chunks, place = [*chunks], self.place
        if not self._seen or not self._expects(self._seen[-1]):
            return chunks
        return self.gather_cache.evicted(chunks, place)

    def _expects(self, unit: Unit) -> bool:
        """Return True if this step has followed the last one's order so far."""
        place = self.place
        return 0 < place <= len(self.order) and self.order[place - 1] is unit

    def _next(self) -> list[tuple[Unit, Operands]]:
        """Return the next units, with the operands of their chunks that they read."""
        place = self.place
        if self._reaches is not None:
            last = place + self._reaches[place - 1]
        else:
            coming = (unit in self._light for unit in islice(self.order, place, None))
            last = place + reach(coming, self._prefetch)
        return [
            (unit, Operands.FORWARD if at < self._turn else self._read_in_backward(unit))
            for at, unit in enumerate(self.order[place:last], place)
        ]
