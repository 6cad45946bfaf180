"""Stand-ins in ``parameter.grad`` of a trained model, so that torch's own clipping works on gradients in shards.

Gradients wait in buckets and chunks, where ``parameter.grad`` is None: ``torch.nn.utils.clip_grad_norm_`` would find nothing to
clip, return 0.0 and say nothing. A :class:`meshfold.mesh.parameters.GradientProxy` stands there instead, except while a
backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakMethod, finalize

from torch import Tensor, nn

from meshfold.engine.errors import TrainingError
from meshfold.engine.states.replicated import States
from meshfold.mesh.parameters import GradientProxy


class ShownGradients:
    """Shows the gradients of :class:`meshfold.engine.states.States`, and changes them when torch changes what is shown."""

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
        settle: a method that sums the gradients over the ranks and unscales them, once; whether there are any. Whoever has
            it is not kept alive.
        are_there: a method: whether there are any, without that.
        stages: this rank has one of several stages of a pipeline, and so some of the parameters.
        advice: what to do instead, for messages.
        """
        self._states, self._advice = states, advice
        self._settle, self._are_there = WeakMethod(settle), WeakMethod(are_there)
        self._stages = stages
        self._covered: dict[int, Tensor] = {}  # complete gradients that wait where the shown ones stand
        self._factors: list[
            tuple[Tensor | float, set[int]]
        ] = []  # what gradients are still to be multiplied with
        self._made: dict[int, GradientProxy] = {}  # by place; the same ones stand there in every step
        self._visible = False
        self._finalizer = finalize(self, _hide, list(states.trained))

    # -- when they stand there --------------------------------------------------------------------------------------

    def show(self) -> None:
        """From now on ``parameter.grad`` is a shown gradient."""
        for place, parameter in enumerate(self._states.trained):
            if parameter.grad is None:
                parameter.grad = self._stand_in(place, parameter)
        self._visible = True

    def hide(self) -> None:
        """Show nothing: a backward comes, which would add to what is there, or the end."""
        if not self._visible:
            return
        for parameter in self._states.trained:
            parameter.grad = None
        self._covered.clear()
        self._factors.clear()
        self._visible = False

    def cover(self) -> None:
        """Show all, also where a complete gradient is: that of this rank's shard alone."""
        for place, parameter in enumerate(self._states.trained):
            if parameter.grad is not None and not isinstance(parameter.grad, GradientProxy):
                self._covered[place], parameter.grad = parameter.grad, None
        self.show()

    def check_unchanged(self) -> None:
        """Refuse to step where the step would not see what was assigned.

        Raises:
            TrainingError: if somebody gave a parameter another gradient.
        """
        if not self._visible:
            return
        for parameter in self._states.trained:
            if parameter.grad is not None and not isinstance(parameter.grad, GradientProxy):
                raise TrainingError(
                    f"parameter.grad of a parameter of shape {tuple(parameter.shape)} was assigned before step(), which would not "
                    "see it: change it in place, as in parameter.grad.mul_(0.5)"
                )

    def hand_back(self) -> None:
        """Complete gradients are back for the optimizer's step, with all that was done to what was shown."""
        covered, factors = dict(self._covered), list(self._factors)
        self.hide()
        self._put(covered)
        self._factors = factors
        self._multiply()

    @contextmanager
    def complete(self, what: str) -> Iterator[None]:
        """Inside gradients are summed, unscaled and where their states expect them.

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
                "a norm of some of the parameters' gradients under a pipeline, whose stages have other parameters: give "
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
        else:  # torch's loop comes to one parameter after the other
            those.update(places)

    def clamp(self, places: Sequence[int], low: float | None, high: float | None) -> None:
        with self.complete("clipping the values"):
            self._states.clamp(places, low, high)

    def clear(self) -> None:
        if _call(self._are_there):
            raise TrainingError(
                "zero_grad(set_to_none=False) on the model or an optimizer would not reach the gradients, which the engine has: "
                "call engine.zero_grad()"
            )

    def local(self, place: int, what: str) -> Tensor:
        with self.complete(what):
            gradient = self._states.gradient(place)
        if gradient is None:
            raise TrainingError(
                f"{what} was called on parameter.grad, which is in chunks that ranks share: {self._advice}"
            )
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
                f"{what} of parameter.grad was asked for, and there are no gradients now: {self._advice}"
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


def _hide(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if isinstance(parameter.grad, GradientProxy):
            parameter.grad = None
