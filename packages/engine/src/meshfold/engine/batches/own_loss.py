"""``loss_fn(output, batch)``: the user's own loss, checked before and after it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from meshfold.engine.batches.shown import shown
from meshfold.mesh import SpecError
from meshfold.mesh.model_io import LABEL_NAMES, is_encoder_decoder
from meshfold.mesh.spec import argument_checks as settings


class FallbackLoss:
    """A ``loss_fn`` for outputs without a loss: a model that makes one keeps its labels, and that counts."""

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        """Args:
        function: of the model's output and the batch.
        """
        self._function = function

    def __call__(self, output: Any, batch: Any) -> Tensor:
        return self._function(output, batch)


def check(loss_fn: object) -> None:
    """Check that an object can be called as ``loss_fn(output, batch)``, as far as can be told beforehand.

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
    signature = settings.signature_mismatch(loss_fn, None, None)
    if signature is not None:
        raise SpecError(
            f"loss_fn takes {signature}: it is called with the model's output and the batch, as in "
            "loss_fn=lambda output, batch: ..."
        )


def leave_out_targets(kwargs: dict[str, Any], model: nn.Module, loss_fn: object) -> dict[str, Any]:
    """A model's keyword arguments where the loss is not its own: without targets, if it can do without.

    With them it would make a loss that nobody asked for, and hand out no more of its logits than that takes.

    Raises:
        SpecError: for an encoder and a decoder, which makes the decoder's input of them.
    """
    if loss_fn is None or isinstance(loss_fn, FallbackLoss):
        return kwargs
    parameters = inspect.signature(model.forward).parameters
    found = [name for name in LABEL_NAMES if name in parameters and kwargs.get(name) is not None]
    if found and is_encoder_decoder(model):
        raise SpecError(
            f"loss_fn with {found[0]} for {type(model).__name__}, an encoder and a decoder: it makes the decoder's input of them, "
            "and a loss of its own. Leave loss_fn out"
        )
    spared = [name for name in found if parameters[name].default is not inspect.Parameter.empty]
    return {name: value for name, value in kwargs.items() if name not in spared}


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
    """Return whether a loss is torch's own, a module or a function of (output, targets)."""
    modules = ("torch.nn.functional", "torch.nn.modules.loss")
    return (type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn).__module__ in modules
