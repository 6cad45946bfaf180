"""Stand-ins in ``parameter.grad`` that let torch's own clipping work on sharded gradients.

Gradients wait in buckets and chunks, and ``parameter.grad`` would be None: ``torch.nn.utils.clip_grad_norm_`` would silently
clip nothing and return 0.0. So it is a :class:`meshfold.mesh.parameters.GradientProxy`, except while a backward runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakMethod, finalize

import torch
from torch import Tensor, nn

from meshfold.engine.errors import TrainingError
from meshfold.engine.optimizers import OWN_SCALER
from meshfold.engine.states.optimizer_gradient import OptimizerGradient
from meshfold.engine.states.protocols import States
from meshfold.mesh.parameters import GradientProxy, metadata


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
        self._of_optimizer = OptimizerGradient(states.optimizer, states.trained, advice)
        self._finalizer = finalize(self, _hide, list(states.trained), self._of_optimizer)

    # -- when they stand there --------------------------------------------------------------------------------------

    def show(self) -> None:
        """Set ``parameter.grad`` to shown gradients from now on."""
        self._show_parameters()
        self._of_optimizer.show()

    def _show_parameters(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # released parameters would answer in Python
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
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._states.trained:
                parameter.grad = None
        self._of_optimizer.hide()
        self._covered.clear()
        self._factors.clear()
        self._visible = False

    def cover(self) -> None:
        """Show all, also instead of complete gradients, which cover this rank's shard only."""
        for place, parameter in enumerate(self._states.trained):
            if parameter.grad is not None and not isinstance(parameter.grad, GradientProxy):
                self._covered[place], parameter.grad = parameter.grad, None
        self._show_parameters()  # the optimizer's tensors have theirs, which norms read

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
            scaler = f". {OWN_SCALER}" if "_amp_" in what else ""
            raise TrainingError(
                f"{what} was called on parameter.grad, which is sharded in chunks: {self._advice}{scaler}"
            )
        return gradient

    def whole(self, place: int, what: str, *, alone: bool) -> Tensor:
        """Return a gradient by its number, whole; ``what`` reads it, for errors."""
        parameter, gradient = self._states.trained[place], self.local(place, what)
        meta = metadata(parameter)
        if meta is None or meta.mesh.size(*meta.placement.split_axes) == 1:
            return gradient
        if not alone:
            raise TrainingError(
                f"{what} was called on parameter.grad and another tensor, but this rank has {tuple(parameter.shape)} of a "
                f"parameter {meta.placement.shape}: parameter.grad.clone() is the whole gradient; what writes in place, as "
                "total.add_(parameter.grad), works on this rank's part"
            )
        return meta.placement.gather(gradient, meta.mesh)

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


def _hide(parameters: Iterable[nn.Parameter], of_optimizer: OptimizerGradient | None = None) -> None:
    if of_optimizer is not None:
        of_optimizer.hide()
    for parameter in parameters:
        if isinstance(parameter.grad, GradientProxy):
            parameter.grad = None
