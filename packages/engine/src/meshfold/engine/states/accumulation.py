"""Gradients of one optimizer step, from the first forward to the optimizer. Stand-ins in ``parameter.grad`` let torch's own
clipping work on sharded gradients.

Gradients wait in buckets and chunks, and ``parameter.grad`` would be None: ``torch.nn.utils.clip_grad_norm_`` would silently
clip nothing and return 0.0. So it is a :class:`meshfold.mesh.parameters.GradientProxy`, except while a backward runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol
from weakref import WeakMethod, finalize

import torch
from torch import Tensor, nn

from meshfold.engine.batches.shown import explain_failure
from meshfold.engine.errors import TrainingError
from meshfold.engine.precision import LossScaler
from meshfold.engine.states.replicated import States
from meshfold.mesh.parameters import GradientProxy

if TYPE_CHECKING:
    from meshfold.zero_gemini import BackwardRole


_ADVICE = (
    "the engine has the gradients. Between engine.backward(loss) and engine.step() torch.nn.utils.clip_grad_norm_ and "
    "clip_grad_value_ work on model.parameters(), and parameter.grad can be multiplied in place; engine.train_step(batch) "
    "clips, steps and releases gradients itself: write Engine(..., clip_grad_norm=1.0) or clip_grad_value=... "
    "engine.last.grad_norm is the norm in the last step"
)
_NO_OPTIMIZER = "this engine has no optimizer: give Engine(..., optimizer=dict(name='adamw', lr=...))"


class CastWeights(Protocol):
    """Protocol of weights in another format, made once a step: :class:`meshfold.engine.model.fp8_weights.Fp8Weights`."""

    def open(self) -> None:
        """Keep casts made from now on."""

    def close(self) -> None:
        """Release the casts: weights change."""


class Accumulation:
    """Forwards and backwards since the last optimizer step.

    Attributes:
        scaler: of the losses.
        micro_steps: how many of them ``train_step`` made.
        backwards: those whose gradients count.
        settled: gradients are summed over the data axes and unscaled, until they are released.
        closed: whether the engine is closed, so that no more gradients arrive.
        summed: whether gradients are summed over the data axes after this backward: no ``no_sync`` is open.
    """

    def __init__(
        self,
        states: States,
        scaler: LossScaler,
        *,
        before_change: Callable[[], None] = lambda: None,
        stages: bool = False,
        advice: str = _ADVICE,
        shows_none: bool = True,
        weights: CastWeights | None = None,
    ) -> None:
        """Args:
        states: take the gradients.
        scaler: of the losses.
        before_change: called before chunks may be stepped with, and before gradients are summed.
        stages: this rank has one of several stages of a pipeline.
        advice: what to do with gradients instead, for messages.
        shows_none: ``parameter.grad`` is a stand-in also while there are no gradients, so that a use of it raises.
        weights: cast once for all forwards and backwards of a step; None if none are.
        """
        self._states, self.scaler, self._before_change = states, scaler, before_change
        self._shown = ShownGradients(states, self.settle, self._are_there, advice, stages=stages)
        self._weights = weights
        self._shows_none = shows_none and states.optimizer is not None
        self.micro_steps = self.backwards = 0
        self.summed, self.closed, self.settled = True, False, False
        self._begun = False  # a forward waits for its backward
        if self._shows_none:
            self._shown.show()

    def check_open(self) -> None:
        """Check that the engine can train.

        Raises:
            TrainingError: without an optimizer, or after ``close()``.
        """
        if self._states.optimizer is None:
            raise TrainingError(_NO_OPTIMIZER)
        if self.closed:
            raise TrainingError(
                "this engine is closed, and trains no more: make another Engine, and close it after the last step"
            )

    def begin(self, *, anew: bool = False) -> None:
        """Start a forward whose backward will follow; ``anew``: begin even if the one before was aborted.

        Raises:
            TrainingError: without an optimizer, or after ``close()``.
        """
        self.check_open()
        if self.settled:
            raise TrainingError(
                "a forward or backward after the gradients were clipped and before step(): gradients are complete once "
                "parameter.grad was used. Clip once, after the last backward of a step, or call zero_grad() first"
            )
        self._shown.hide()
        if anew or not self._begun:
            self._begun = True
            if self._weights is not None and not self.backwards:
                self._weights.open()
            self._states.begin(first=not self.backwards)

    def break_off(self) -> None:
        """Record that the forward failed, and no backward will follow."""
        self._begun = False

    @contextmanager
    def taking(self, kind: BackwardRole, *, shown: bool = True, made_by_all: bool = True) -> Iterator[None]:
        """Context manager of a backward: gradients that arrive inside are summed over the data ranks, now or later.

        Args:
            kind: which of a step's backwards it is.
            shown: ``parameter.grad`` shows them afterwards; False where the step comes next.
            made_by_all: it reaches these parameters on some rank; a parameter that it does not reach has a zero gradient.
        """
        self.begin()
        if kind == "final" and self._states.all_read:  # chunks may be stepped before step() is called
            self._before_change()
        with self._states.backward(kind):
            yield
            if made_by_all:
                self._states.end_backward(kind)
        self._begun = False
        self.backwards += 1
        if shown:
            self._shown.show()

    def backward(self, share: Tensor, kind: BackwardRole, *, retain_graph: bool = False, shown: bool = True) -> None:
        """Backward of this rank's share of a loss; ``shown`` as for :meth:`taking`."""
        with self.taking(kind, shown=shown):
            try:
                (share * self.scaler.scale).backward(retain_graph=retain_graph)
            except RuntimeError as error:
                explain_failure(error, self._states)
                raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager: backwards inside are not the last, so their gradients are not summed over the data axes yet."""
        before, self.summed = self.summed, False
        try:
            yield
        finally:
            self.summed = before

    def finish(self) -> torch.optim.Optimizer:
        """Sum the gradients that were not summed yet, and unscale all; return the optimizer to step.

        Raises:
            TrainingError: without an optimizer, if there was no backward, or if ``parameter.grad`` was assigned.
        """
        optimizer = self._states.optimizer
        if optimizer is None:
            raise TrainingError(_NO_OPTIMIZER)
        if not self.backwards:
            raise TrainingError(
                "step() without a backward() since the last step: there are no gradients. Call engine.backward(loss) in place of "
                "loss.backward()"
            )
        self._shown.check_unchanged()
        if self._weights is not None:
            self._weights.close()
        if self.settled:
            self._shown.hand_back()
        else:
            self._complete()
        return optimizer

    def complete(self, what: str) -> AbstractContextManager[None]:
        """Return a context in which gradients are summed, unscaled and where the states expect them; ``what``: for, in errors."""
        return self._shown.complete(what)

    def _are_there(self) -> bool:
        return bool(self.backwards)

    def settle(self) -> bool:
        """Sum the gradients over the data axes and unscale them, until they are released; return whether there are any."""
        if self.backwards and not self.settled:
            self._complete()
            self._shown.cover()
        return self.settled

    def _complete(self) -> None:
        self._before_change()
        self._shown.hide()
        self._states.finish(1.0 / self.scaler.scale)
        self.settled = True

    def forget(self) -> None:
        """Release the gradients; the next accumulation begins."""
        self._shown.hide()
        self._states.forget()
        self.backwards = self.micro_steps = 0
        self._begun, self.settled = self._begun and not self.settled, False
        if self._weights is not None and not self._begun:  # else a backward may recompute with them
            self._weights.close()
        if self._shows_none and not self.closed:
            self._shown.show()

    def close(self) -> None:
        """Close: no more gradients arrive."""
        self.closed = True
        self._shown.hide()


class ShownGradients:
    """Shows the gradients of :class:`meshfold.engine.states.States`, and changes them when torch changes those it shows."""

    def __init__(
        self,
        states: States,
        settle: Callable[[], bool],
        are_there: Callable[[], bool],
        advice: str,
        *,
        stages: bool = False,
    ) -> None:
        """Args:
        states: have the gradients.
        settle: a method that sums the gradients over the ranks and unscales them, once, and returns whether there are any.
            Its object is not kept alive.
        are_there: a method that only returns whether there are any.
        stages: this rank has one of several stages of a pipeline, and so some of the parameters.
        advice: what to do instead, for messages.
        """
        self._states, self._advice = states, advice
        self._settle, self._are_there = WeakMethod(settle), WeakMethod(are_there)
        self._stages = stages
        self._covered: dict[int, Tensor] = {}  # .grad values hidden by proxies, by index
        self._factors: list[tuple[Tensor | float, set[int]]] = []  # pending factors and the indices they apply to
        self._made: dict[int, GradientProxy] = {}  # proxies by index, reused in every step
        self._visible = False
        self._listens = False
        self._finalizer = finalize(self, _hide, list(states.trained))

    # -- when they stand there --------------------------------------------------------------------------------------

    def show(self) -> None:
        """Set ``parameter.grad`` to shown gradients from now on."""
        for place, parameter in enumerate(self._states.trained):
            if parameter.grad is None:
                parameter.grad = self._stand_in(place, parameter)
        self._visible = True
        if not self._listens and "torch._dynamo" in sys.modules:
            self._listens = True
            _hide_from_compiler(self)

    def hide_for_now(self) -> None:
        """Show nothing while the compiler traces, until :meth:`show`, since it copies each parameter with its ``grad``."""
        if self._visible:
            _hide(self._states.trained)

    def show_again(self) -> None:
        """Show what :meth:`hide_for_now` has hidden."""
        if self._visible:
            self.show()

    def hide(self) -> None:
        """Show nothing: at the end, or before a backward, which would add to the shown gradients."""
        if not self._visible:
            return
        for parameter in self._states.trained:
            parameter.grad = None
        self._covered.clear()
        self._factors.clear()
        self._visible = False

    def cover(self) -> None:
        """Show all, also instead of complete gradients, which cover this rank's shard only."""
        for place, parameter in enumerate(self._states.trained):
            if parameter.grad is not None and not isinstance(parameter.grad, GradientProxy):
                self._covered[place], parameter.grad = parameter.grad, None
        self.show()

    def check_unchanged(self) -> None:
        """Refuse a step that would not see an assigned gradient.

        Raises:
            TrainingError: if a parameter was assigned another gradient, or none.
        """
        if not self._visible:
            return
        for parameter in self._states.trained:
            if not isinstance(parameter.grad, GradientProxy):
                raise TrainingError(
                    f"parameter.grad of a parameter of shape {tuple(parameter.shape)} was assigned before step(), which would "
                    "ignore it: change it in place, as in parameter.grad.mul_(0.5). For None, call requires_grad_(False) on the "
                    "parameter before the forward, or engine.zero_grad() to drop all gradients"
                )

    def hand_back(self) -> None:
        """Restore complete gradients for the optimizer's step, with all changes made to the shown ones."""
        covered, factors = dict(self._covered), list(self._factors)
        self.hide()
        self._put(covered)
        self._factors = factors
        self._multiply()

    @contextmanager
    def complete(self, what: str) -> Iterator[None]:
        """Context manager: inside, gradients are summed, unscaled and where their states expect them.

        Raises:
            TrainingError: if there are none.
        """
        self._check(what)
        if not self._covered:
            self._multiply()
            yield
            return
        covered = dict(self._covered)
        _hide([self._states.trained[place] for place in covered])
        self._put(covered)
        self._multiply()
        try:
            yield
        finally:
            self.cover()

    # -- what torch does with them: see GradientOwner -----------------------------------------------------------------

    def norm(self, places: Sequence[int], norm_type: float) -> Tensor:
        if self._stages and len(set(places)) < len(self._states.trained):
            raise TrainingError(
                "the norm of some gradients under a pipeline, whose stages have different parameters: give "
                "torch.nn.utils.clip_grad_norm_ all of model.parameters()"
            )
        with self.complete("the norm"):
            return self._states.norm_of(places, norm_type)

    def multiply(self, places: Sequence[int], factor: Tensor | float) -> None:
        self._check("a product")
        last, those = self._factors[-1] if self._factors else (None, set(places))
        same = last is factor or (isinstance(last, float) and isinstance(factor, float) and last == factor)
        if not same or those & set(places):
            self._factors.append((factor, set(places)))
        else:  # torch scales parameters one by one
            those.update(places)

    def clamp(self, places: Sequence[int], low: float | None, high: float | None) -> None:
        with self.complete("clipping the values"):
            self._states.clamp(places, low, high)

    def clear(self) -> None:
        """Refuse to zero gradients that exist: the engine holds them."""
        if _call(self._are_there):
            raise TrainingError(
                "zero_grad(set_to_none=False) on the model or an optimizer does not reach the gradients, which the engine holds: "
                "call engine.zero_grad()"
            )

    def local(self, place: int, what: str) -> Tensor:
        """Return this rank's gradient of a parameter by its number; ``what`` reads it, for errors."""
        with self.complete(what):
            gradient = self._states.gradient(place)
        if gradient is None:
            raise TrainingError(f"{what} was called on parameter.grad, which is sharded in chunks: {self._advice}")
        return gradient

    def _stand_in(self, place: int, parameter: nn.Parameter) -> GradientProxy:
        made = self._made.get(place)
        if made is None or (made.shape, made.dtype, made.device) != (
            parameter.shape,
            parameter.dtype,
            parameter.device,
        ):
            made = self._made[place] = GradientProxy.of(self, place, parameter)
        return made

    # -- within -----------------------------------------------------------------------------------------------------

    def _check(self, what: str) -> None:
        if not _call(self._settle):
            raise TrainingError(
                f"{what} of parameter.grad was requested, but there are no gradients now: {self._advice}"
            )

    def _multiply(self) -> None:
        for factor, places in self._factors:
            self._states.multiply(sorted(places), factor)
        self._factors.clear()

    def _put(self, gradients: Mapping[int, Tensor]) -> None:
        for place, gradient in gradients.items():
            self._states.trained[place].grad = gradient


def _call(method: WeakMethod[Callable[[], bool]]) -> bool:
    found = method()
    return found is not None and found()


def _hide_from_compiler(shown: ShownGradients) -> None:
    """Hide the proxies in ``.grad`` whenever the compiler traces, for as long as they exist.

    While tracing a parameter in a chunk is gathered, but its ``grad`` still has the released shape.
    """
    from torch._dynamo.callback import callback_handler

    hide, again = WeakMethod(shown.hide_for_now), WeakMethod(shown.show_again)

    def begin(_: object) -> None:
        if (call := hide()) is not None:
            call()

    def end(_: object) -> None:
        if (call := again()) is not None:
            call()

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)

    def forget() -> None:
        for callback, known in (
            (begin, callback_handler.start_callbacks),
            (end, callback_handler.end_callbacks),
        ):
            if callback in known:  # absent after torch.compiler.reset()
                known.remove(callback)

    finalize(shown, forget)


def _hide(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if isinstance(parameter.grad, GradientProxy):
            parameter.grad = None
