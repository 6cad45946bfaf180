"""Gathering and releasing while a model runs: hooks on its units and on the autograd graph.

A unit is *entered* before its forward and, through a hook on what it returned, before its backward; it is *left* after
its forward, and when the gradients of its inputs are there. Entering gathers its chunks, and starts on those of the
unit that came next the last time; what no entered unit needs is released then. The order of units is learnt from each
step for the next: a step with another order gathers later than it might, and is right all the same.

It is counted how often a unit was called and left again in backward: what was left as often as it was called is read no
more before the next step. A recomputation comes between the beginning of backward of a call and its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.runtime.gather_cache import Staying
from meshfold.zero_gemini.runtime.gradient_arrival import watch_inputs, watch_output
from meshfold.zero_gemini.runtime.prefetch import reach
from meshfold.zero_gemini.runtime.units import Unit


class Runtime:
    """Keeps gathered what is wanted now and next.

    Attributes:
        order: names of the units entered by the last step that was trained, forward and backward.
        most_chunks: that a unit has.
        task: autograd's number of the backward that runs, not of one inside of it; None before it came to a unit.
        staying: which chunks stay between two uses.
        is_quiet: hooks do nothing.
        on_left: called in a backward whenever a unit was left for the last time.
        check: called before each forward of the model; raises if there must not be one.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        chunks_of: Callable[[Unit], list[Chunk]],
        *,
        prefetch: int,
        light: Collection[Unit] = (),
        steps_in_background: Callable[[Chunk], bool] = lambda chunk: False,
        before_evaluation: Callable[[], None] | None = None,
    ) -> None:
        """Args:
        model: the whole model; its forward begins and ends what is done without gradients.
        units: its parts.
        chunks_of: the chunks that a unit's parameters are in.
        prefetch: how many units ahead are gathered,
        light: not counting these (:mod:`meshfold.zero_gemini.runtime.prefetch`).
        steps_in_background: says if the optimizer steps a chunk beside the computation; asked again by ``reread``.
        before_evaluation: done before a forward without gradients while steps are due: what comes of it is looked at
            before the ranks agree again whether all went well. None: nothing.
        """
        self._all = {unit: chunks_of(unit) for unit in units}
        self._users: dict[Chunk, list[Unit]] = {}
        for unit, all_ in self._all.items():
            for chunk in all_:
                self._users.setdefault(chunk, []).append(unit)
        self.most_chunks = max(map(len, self._all.values()), default=0)
        self._open: Counter[Unit] = Counter()  # calls of this step that backward has not left
        self._unsure: set[Unit] = set()  # called in a way that hides how often backward comes
        self._hidden: Counter[Unit] = Counter()  # calls of reentrant checkpointing in this step
        self._repeated: Counter[Unit] = Counter()  # and those that backward has repeated
        self._repeating: set[Unit] = set()  # called several times; its backward may still run
        self._repetition_ran = False  # a gradient came in that backward
        self.task: int | None = None
        self.on_left: Callable[[], None] | None = None
        self.check: Callable[[], None] | None = None
        self._chunks: dict[Unit, list[Chunk]] = {}
        self._steps_in_background = steps_in_background
        self.reread()
        self._prefetch, self._light = prefetch, light
        self._before_evaluation = before_evaluation
        self._inside: list[Unit] = []  # entered and not left yet
        self._behind: set[Unit] = set()  # whose backward has begun
        self._recomputed: set[Unit] = set()  # and whose has not
        self._backwards = 0
        self._unfinished: dict[
            Unit, None
        ] = {}  # forwards left by an exception, as a pipeline's stages leave them
        self.staying = Staying()
        self.is_quiet = False
        self._held: dict[Chunk, None] = {}  # gathered, or on their way
        self._in_backward = False
        self.order: list[Unit] = []
        self._seen: list[Unit] = []
        self._handles = [
            model.register_forward_pre_hook(torch.compiler.disable(self._start)),
            model.register_forward_hook(torch.compiler.disable(self._end), always_call=True),
        ]
        for unit in units:
            if self._all[unit]:
                self._handles += [
                    unit.module.register_forward_pre_hook(self._before(unit), with_kwargs=True),
                    unit.module.register_forward_hook(self._after(unit)),
                ]

    @property
    def place(self) -> int:
        """How many units this step has entered, in forward and in backward."""
        return len(self._seen)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def reread(self) -> None:
        """After chunks were moved: find those that come and go, or that a step may be pending of."""
        self._chunks = {
            unit: [c for c in all_ if not c.resident or self._steps_in_background(c)]
            for unit, all_ in self._all.items()
        }

    def begin_step(self) -> None:
        """Before each training step: what was seen becomes what is expected."""
        if self._seen:
            self.order, self._seen = self._seen, []
            self.staying.learn([self._chunks[unit] for unit in self.order])
        self.unlearn()

    def unlearn(self) -> None:
        """Forget what was seen since the step began."""
        self._seen.clear()
        self._unfinished.clear()
        self._open.clear()
        self._unsure.clear()
        self._hidden.clear()
        self._repeated.clear()
        self._end_repetition()
        self.task = None

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
        for chunk in chunks:
            chunk.release()
            del self._held[chunk]

    # -- hooks --------------------------------------------------------------------------------------------------

    def _start(self, module: nn.Module, args: Any) -> None:
        if self.is_quiet:
            return
        if self.check is not None and graph_task() < 0:  # else it is recomputed
            self.check()
        if not self._in_backward:  # a forward that raised may have left units entered
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
            self._enter(unit)
            return watch_inputs(args, kwargs, self._call(unit, args, kwargs))

        # A compiled block has its graph between hooks, not round them.
        found: Callable[..., Any] = torch.compiler.disable(before)
        return found

    def _after(self, unit: Unit) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self.is_quiet:
                return
            if unit in self._behind:  # recomputed by activation checkpointing: its backward comes next
                return
            if (
                graph_task() >= 0
            ):  # recomputed with others: what autograd has saved of it must stay until its backward
                self._recomputed.add(unit)
            elif unit in self._inside:
                self._inside.remove(unit)
            if torch.is_grad_enabled():
                watch_output(output, self._before_backward(unit))

        found: Callable[..., Any] = torch.compiler.disable(after)
        return found

    def _before_backward(self, unit: Unit) -> Callable[[Tensor], None]:
        """Of one call: a unit that was called twice is entered, and left, twice."""
        begun = 0  # in which backward

        def before_backward(gradient: Tensor) -> None:
            nonlocal begun
            if not self._in_backward:
                self._in_backward = True
                self.task = graph_task()
                self._backwards += 1
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
                # What they compute with themselves, before a block that was not reached, may be wanted at any time.
                self._unfinished.update(dict.fromkeys(self._inside))
                for left in self._unfinished:
                    self._enter(left, again=True)
            if begun != self._backwards:
                begun = self._backwards
                self._behind.add(unit)
                if unit in self._recomputed:
                    self._recomputed.remove(unit)
                    self._inside.remove(unit)
                self._enter(unit, again=True)

        return before_backward

    def _call(self, unit: Unit, args: Any, kwargs: Any) -> Callable[[], None]:
        """Count a call of a unit. Return what is called when backward leaves it."""
        # Without gradients inside of a forward that has them: reentrant checkpointing, or nothing that backward comes to.
        if not torch.is_grad_enabled():
            self._unsure.add(unit)
            # Checkpointing is given what wants a gradient. What `no_grad` computes (recycling, a teacher) wants none.
            self._hidden[unit] += graph_task() < 0 and any(
                isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_flatten((args, kwargs))[0]
            )
        elif graph_task() >= 0 and self._hidden[unit] > self._repeated[unit]:
            self._repeated[unit] += 1
            if self._repetition_ran:
                self._end_repetition()
            if self._hidden[unit] > 1:
                self._repeating.add(unit)
        is_open = torch.is_grad_enabled() and graph_task() < 0  # else it is recomputed in a backward
        self._open[unit] += is_open

        def left() -> None:
            nonlocal is_open
            if unit in self._inside:
                self._inside.remove(unit)
            if is_open:
                is_open = False
                self._open[unit] -= 1
                if not self._open[unit] and self.on_left is not None:
                    self.on_left()

        return left

    # -- what is over -------------------------------------------------------------------------------------------

    def is_over(self, chunk: Chunk) -> bool:
        """Whether nothing in this step reads a chunk's parameters any more, as far as the calls of its units tell."""
        return not any(self._open[unit] or unit in self._unsure for unit in self._users.get(chunk, ()))

    def is_unsure(self, chunk: Chunk) -> bool:
        """Whether backward may come to a unit of a chunk in ways that were not seen in forward."""
        return any(unit in self._unsure for unit in self._users.get(chunk, ()))

    def will_be_repeated(self, chunk: Chunk) -> bool:
        """Return whether backward has still to repeat a call of a unit of the chunk, or is at it: gradients come of that."""
        return any(
            self._hidden[unit] > self._repeated[unit] or unit in self._repeating
            for unit in self._users.get(chunk, ())
        )

    def note_gradient(self) -> bool:
        """Note that a parameter's gradient comes. Return whether it comes in a backward inside of the one that runs."""
        is_inner = self.task not in (None, graph_task())
        if is_inner:
            self._repetition_ran = True
        elif self._repeating:
            self._end_repetition()
        return is_inner

    def _end_repetition(self) -> None:
        self._repeating.clear()
        self._repetition_ran = False

    def _after_backward(self) -> None:
        self._in_backward = False
        self._behind.clear()
        self._inside.clear()
        self._recomputed.clear()
        self._release(self._leaving(self._held))

    # -- what is held -------------------------------------------------------------------------------------------

    def _enter(self, unit: Unit, *, again: bool = False) -> None:
        if again or unit not in self._inside:
            self._inside.append(unit)
            if torch.is_grad_enabled() or self._in_backward:
                self._seen.append(unit)
        wanted = dict.fromkeys(chunk for inside in self._inside for chunk in self._chunks[inside])
        coming = [] if not self._expects(unit) else self._next()
        ahead = dict.fromkeys(chunk for later in coming for chunk in self._chunks[later])
        self._release(
            self._leaving(chunk for chunk in self._held if chunk not in wanted and chunk not in ahead)
        )
        for chunk in wanted:
            if chunk.step_is_pending and chunk not in self._chunks[unit]:
                continue  # stepped in this backward: nobody inside reads it any more
            chunk.gather()
            self._held[chunk] = None
        for chunk in ahead:
            # What the optimizer is still at work on can wait: to wait for it here would delay this unit.
            if chunk.can_gather_early:
                chunk.gather()
                self._held[chunk] = None
        for chunk in self._chunks[unit]:
            chunk.wait()

    def _leaving(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Which of the chunks that nobody is inside of go."""
        chunks, place = [*chunks], self.place
        if not self._seen or not self._expects(self._seen[-1]):
            return chunks
        return self.staying.leaving(chunks, place)

    def _expects(self, unit: Unit) -> bool:
        """Whether this step has gone as the last one until here."""
        place = self.place
        return 0 < place <= len(self.order) and self.order[place - 1] is unit

    def _next(self) -> list[Unit]:
        place = self.place
        coming = (unit in self._light for unit in islice(self.order, place, None))
        return self.order[place : place + reach(coming, self._prefetch)]


def graph_task() -> int:
    """Autograd's number of the backward in which this is called; below zero outside of one."""
    return int(torch._C._current_graph_task_id())
