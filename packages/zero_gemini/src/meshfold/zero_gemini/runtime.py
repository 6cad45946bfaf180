"""Gathering and releasing while a model runs: hooks on its units and on the autograd graph.

A unit is *entered* before its forward and, through a hook on what it returned, before its backward; it is *left* after
its forward, and when the gradients of its inputs are there. Entering gathers its chunks, and starts on those of the
unit that came next the last time; what no entered unit needs is released then. The order of units is learnt from each
step for the next: a step with another order gathers later than it might, and is right all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from meshfold.zero_gemini.chunk import Chunk
from meshfold.zero_gemini.passing import watch_inputs
from meshfold.zero_gemini.units import Unit


class Runtime:
    """Keeps gathered what is wanted now and next.

    Attributes:
        order: names of the units entered by the last step that was trained, forward and backward.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        chunks_of: Callable[[Unit], list[Chunk]],
        *,
        prefetch: int,
    ) -> None:
        """Args:
        model: the whole model; its forward begins and ends what is done without gradients.
        units: its parts.
        chunks_of: the chunks that a unit's parameters are in.
        prefetch: how many units ahead are gathered.
        """
        self._all = {unit: chunks_of(unit) for unit in units}
        self._chunks: dict[Unit, list[Chunk]] = {}
        self.reread()
        self._prefetch = prefetch
        self._inside: list[Unit] = []  # entered and not left yet
        self._behind: set[Unit] = set()  # whose backward has begun
        self._backwards = 0
        self._held: dict[Chunk, None] = {}  # gathered, or on their way
        self._in_backward = False
        self.order: list[Unit] = []
        self._seen: list[Unit] = []
        self._handles = [model.register_forward_pre_hook(self._start), model.register_forward_hook(self._end)]
        for unit in units:
            if self._all[unit]:
                self._handles += [
                    unit.module.register_forward_pre_hook(self._before(unit), with_kwargs=True),
                    unit.module.register_forward_hook(self._after(unit)),
                ]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def reread(self) -> None:
        """After chunks have changed homes: which of them come and go."""
        self._chunks = {
            unit: [c for c in all_ if not c.resident or c.due] for unit, all_ in self._all.items()
        }

    def begin_step(self) -> None:
        """Before each training step: what was seen becomes what is expected."""
        if self._seen:
            self.order, self._seen = self._seen, []

    def abandon(self) -> None:
        """Forget a step that raised in the middle."""
        self._in_backward = False
        self._behind.clear()
        self._seen.clear()
        self.rest()

    def rest(self) -> None:
        """Release everything."""
        for chunk in self._held:
            chunk.release()
        self._held.clear()
        self._inside.clear()

    # -- hooks --------------------------------------------------------------------------------------------------

    def _start(self, module: nn.Module, args: Any) -> None:
        if not self._in_backward:  # a forward that raised may have left units entered
            self._inside.clear()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self.rest()

    def _before(self, unit: Unit) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._enter(unit)
            return watch_inputs(args, kwargs, lambda: self._left_backward(unit))

        # A compiled block has its graph between hooks, not round them.
        found: Callable[..., Any] = torch.compiler.disable(before)
        return found

    def _after(self, unit: Unit) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if unit in self._behind:  # recomputed by activation checkpointing: its backward comes next
                return
            if unit in self._inside:
                self._inside.remove(unit)
            if torch.is_grad_enabled():
                begin = self._before_backward(unit)
                for tensor in tree_flatten(output)[0]:
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        tensor.register_hook(begin)

        found: Callable[..., Any] = torch.compiler.disable(after)
        return found

    def _before_backward(self, unit: Unit) -> Callable[[Tensor], None]:
        """Of one call: a unit that was called twice is entered, and left, twice."""
        begun = 0  # in which backward

        def before_backward(gradient: Tensor) -> None:
            nonlocal begun
            if not self._in_backward:
                self._in_backward = True
                self._backwards += 1
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
            if begun != self._backwards:
                begun = self._backwards
                self._behind.add(unit)
                self._enter(unit, again=True)

        return before_backward

    def _left_backward(self, unit: Unit) -> None:
        if unit in self._inside:
            self._inside.remove(unit)

    def _after_backward(self) -> None:
        self._in_backward = False
        self._behind.clear()
        self.rest()

    # -- what is held -------------------------------------------------------------------------------------------

    def _enter(self, unit: Unit, *, again: bool = False) -> None:
        if again or unit not in self._inside:
            self._inside.append(unit)
            if torch.is_grad_enabled() or self._in_backward:
                self._seen.append(unit)
        wanted = dict.fromkeys(chunk for inside in self._inside for chunk in self._chunks[inside])
        coming = [] if not self._expects(unit) else self._next()
        ahead = dict.fromkeys(chunk for later in coming for chunk in self._chunks[later])
        for chunk in [*self._held]:
            if chunk not in wanted and chunk not in ahead:
                chunk.release()
                del self._held[chunk]
        for chunk in wanted:
            chunk.gather()
            self._held[chunk] = None
        for chunk in ahead:
            if (
                not chunk.is_due
            ):  # what the optimizer is still at work on can wait: to wait for it here would delay this unit
                chunk.gather()
                self._held[chunk] = None
        for chunk in self._chunks[unit]:
            chunk.wait()

    def _expects(self, unit: Unit) -> bool:
        """Whether this step has gone as the last one until here."""
        place = len(self._seen)
        return 0 < place <= len(self.order) and self.order[place - 1] is unit

    def _next(self) -> list[Unit]:
        place = len(self._seen)
        return self.order[place : place + self._prefetch]
