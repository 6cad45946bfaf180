"""A stand-in in ``.grad`` of a tensor that the optimizer updates in place of a parameter: what reads it is refused.

Master weights and shards of chunks get their gradients right before the step. Until then torch's ``GradScaler.unscale_`` would
find none on the engine's optimizer, silently unscale nothing, and the step would be of gradients that are too large.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import ref

import torch
from torch import Tensor

from meshfold.engine.errors import TrainingError
from meshfold.engine.optimizers import OWN_SCALER
from meshfold.mesh.parameters import GradientProxy


class OptimizerGradient:
    """Owner of a :class:`GradientProxy` in ``.grad`` of one tensor of an optimizer, whose every use it refuses."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, trained: Iterable[Tensor], advice: str) -> None:
        """Args:
        optimizer: None for evaluation only, where nothing stands.
        trained: the parameters, which have stand-ins of their own.
        advice: what to do instead, for the error.
        """
        self._parameters = {id(parameter) for parameter in trained}
        # Weak: what takes this away when an engine is dropped would else keep its optimizer alive, and all that refers to it.
        self._optimizer = None if optimizer is None else ref(optimizer)
        self._advice, self._has_others = advice, self._first() is not None
        self._tensor: ref[Tensor] | None = None  # where it stands
        self._made: GradientProxy | None = None

    def show(self) -> None:
        """Stand there, unless a gradient does."""
        tensor = self._first() if self._has_others else None
        if tensor is None or tensor.grad is not None:
            return
        made = self._made
        if made is None or (made.shape, made.dtype, made.device) != (tensor.shape, tensor.dtype, tensor.device):
            made = self._made = GradientProxy.of(self, 0, tensor)
        self._tensor, tensor.grad = ref(tensor), made

    def hide(self) -> None:
        """Stand there no more."""
        tensor = None if self._tensor is None else self._tensor()
        if tensor is not None and isinstance(tensor.grad, GradientProxy):
            tensor.grad = None
        self._tensor = None

    def _first(self) -> Tensor | None:
        """Return the optimizer's first tensor that is no parameter. One is enough: a GradScaler reads the gradients of all."""
        optimizer = None if self._optimizer is None else self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return next((one for group in groups for one in group["params"] if id(one) not in self._parameters), None)

    # -- what torch does with it: see GradientOwner -------------------------------------------------------------------

    def norm(self, places: Sequence[int], norm_type: float) -> Tensor:
        raise self._error("the norm")

    def multiply(self, places: Sequence[int], factor: Tensor | float) -> None:
        raise self._error("a product")

    def clamp(self, places: Sequence[int], low: float | None, high: float | None) -> None:
        raise self._error("clipping the values")

    def clear(self) -> None:
        raise self._error("zero_grad(set_to_none=False)")

    def local(self, place: int, what: str) -> Tensor:
        raise self._error(what)

    def whole(self, place: int, what: str, *, alone: bool) -> Tensor:
        raise self._error(what)

    def _error(self, what: str) -> TrainingError:
        if "_amp_" in what:
            return TrainingError(
                "a GradScaler unscales by hand the gradients of the engine's optimizer, which gets them in engine.step(). "
                f"{OWN_SCALER}"
            )
        return TrainingError(
            f"{what} of gradients of the engine's optimizer was requested, which gets them in engine.step(): use those of "
            f"model.parameters(). {self._advice}"
        )
