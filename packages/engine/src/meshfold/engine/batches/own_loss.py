"""``loss_fn(output, batch)``: the user's own loss, checked before and after it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from meshfold.engine.batches.shown import shown
from meshfold.mesh import SpecError


def check(loss_fn: object) -> None:
    """Whether something can be called as ``loss_fn(output, batch)``, as far as can be told beforehand.

    Raises:
        SpecError: if not.
    """
    if loss_fn is None:
        return
    if not callable(loss_fn):
        raise SpecError(f"loss_fn={loss_fn!r}: a function of the model's output and the batch")
    if isinstance(loss_fn, type):
        raise SpecError(
            f"loss_fn={loss_fn.__name__} is a class: make one, and write loss_fn=lambda output, batch: "
            f"criterion(output, batch[1]) with criterion = {loss_fn.__name__}()"
        )
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # of a built-in function, which does not say
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise SpecError(
            f"loss_fn takes {signature}: it is called with the model's output and the batch, as in "
            "loss_fn=lambda output, batch: ..."
        ) from error


def call(loss_fn: Callable[[Any, Any], Tensor], output: Any, batch: Any) -> Tensor:
    """The scalar loss that it makes; an error from inside it says in a note what it was called with.

    Args:
        loss_fn: the user's.
        output: the model's.
        batch: in the user's form.

    Raises:
        SpecError: if it makes anything else, or is a criterion of torch, which wants the targets and not the batch.
    """
    if _is_criterion(loss_fn) and isinstance(batch, Mapping | tuple | list):
        targets = "batch['labels']" if isinstance(batch, Mapping) else "batch[1]"
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise SpecError(
            f"loss_fn={name} wants the targets, and is called with the whole batch: write loss_fn=lambda output, batch: "
            f"criterion(output, {targets})"
        )
    try:
        loss = loss_fn(output, batch)
    except Exception as error:
        error.add_note(f"loss_fn was called with output = {shown(output)}, batch = {shown(batch)}")
        raise
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise SpecError(
            f"loss_fn returned {shown(loss)}: return a tensor of one number, without .item() and with the mean over the "
            "batch's targets taken"
        )
    return loss


def _is_criterion(loss_fn: object) -> bool:
    """Whether it is torch's own, a module or a function of (output, targets)."""
    modules = ("torch.nn.functional", "torch.nn.modules.loss")
    return (type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn).__module__ in modules
