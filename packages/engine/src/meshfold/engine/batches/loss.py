"""Losses: the user's ``loss_fn(output, batch)``, checked before and after its call, and the targets that a loss is a mean over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshfold.engine.batches.shown import shown
from meshfold.mesh import SpecError
from meshfold.mesh.model_io import IGNORE_INDEX, LABEL_NAMES, CrossEntropyCall, is_encoder_decoder
from meshfold.mesh.spec import argument_checks as settings
from meshfold.mesh.tracking import uncompiled, untracked


class FallbackLoss:
    """A ``loss_fn`` for outputs without a loss: a model that computes one keeps its labels, and its loss is used."""

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        """Args:
        function: of the model's output and the batch.
        """
        self._function = function

    def __call__(self, output: Any, batch: Any) -> Tensor:
        return self._function(output, batch)


def fields_of(loss_fn: object) -> tuple[str, ...] | None:
    """Return the entries of a batch that an objective reads and the model is not called with; None for any other loss.

    An objective is a ``loss_fn`` with an attribute ``batch_fields``. It replaces the model's own loss. The model is called with
    labels, as if it computed the loss itself, and need not gather its logits.
    """
    fields = getattr(loss_fn, "batch_fields", None)
    return None if fields is None else tuple(fields)


def check_loss_fn(loss_fn: object) -> None:
    """Check that an object can be called as ``loss_fn(output, batch)``, as far as possible before the call.

    Raises:
        SpecError: if not.
    """
    if loss_fn is None:
        return
    if not callable(loss_fn):
        raise SpecError(f"loss_fn={loss_fn!r}: give a function of the model's output and the batch")
    if isinstance(loss_fn, type):
        raise SpecError(
            f"loss_fn={loss_fn.__name__} is a class: make an instance, and write loss_fn=lambda output, batch: "
            f"criterion(output, batch[1]) with criterion = {loss_fn.__name__}()"
        )
    signature = settings.signature_mismatch(loss_fn, None, None)
    if signature is not None:
        raise SpecError(
            f"loss_fn takes {signature}: it is called with the model's output and the batch, as in "
            "loss_fn=lambda output, batch: ..."
        )


def leave_out_targets(kwargs: dict[str, Any], model: nn.Module, loss_fn: object) -> dict[str, Any]:
    """Return a model's keyword arguments for a loss that is not its own: without targets, if they are optional.

    With them it would compute an unused loss, and return only the logits that this needs. If an objective is set
    (:func:`fields_of`), they stay, and the fields that it alone reads are taken out.

    Raises:
        SpecError: for an encoder-decoder, which makes the decoder's input from them.
    """
    if loss_fn is None or isinstance(loss_fn, FallbackLoss):
        return kwargs
    if (own := fields_of(loss_fn)) is not None:
        return {name: value for name, value in kwargs.items() if name not in own}
    parameters = inspect.signature(model.forward).parameters
    found = [name for name in LABEL_NAMES if name in parameters and kwargs.get(name) is not None]
    if found and is_encoder_decoder(model):
        raise SpecError(
            f"loss_fn with {found[0]} for {type(model).__name__}, an encoder-decoder: it makes the decoder's input from them, and "
            "computes its own loss. Leave loss_fn out"
        )
    spared = [name for name in found if parameters[name].default is not inspect.Parameter.empty]
    return {name: value for name, value in kwargs.items() if name not in spared}


def call_loss_fn(loss_fn: Callable[[Any, Any], Tensor], output: Any, batch: Any) -> Tensor:
    """Return the scalar loss of ``loss_fn``; an error from inside gets a note with its arguments.

    Args:
        loss_fn: the user's.
        output: the model's.
        batch: in the user's form.

    Raises:
        SpecError: if it returns anything else, or is a criterion of torch, which needs the targets and not the batch.
    """
    if _is_criterion(loss_fn) and isinstance(batch, Mapping | tuple | list):
        targets = "batch['labels']" if isinstance(batch, Mapping) else "batch[1]"
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise SpecError(
            f"loss_fn={name} needs the targets, but is called with the whole batch: write loss_fn=lambda output, batch: "
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
    """Return True if a loss is torch's own: a module, or a function of (output, targets)."""
    modules = ("torch.nn.functional", "torch.nn.modules.loss")
    return (type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn).__module__ in modules


class LossCalls(TorchFunctionMode):
    """Observer of cross-entropy calls: they show which targets a loss averages over.

    Ranks' means are combined by their number of targets, which must be known: targets with another ``ignore_index`` than
    -100 do not count either, and a mean weighted by class is not a mean over targets.

    Attributes:
        ignored: their ``ignore_index``; -100 by default.
        counts: of each call, and of each CTC loss, the targets that its mean is over.
    """

    def __init__(self, *, parts: str, exact: bool) -> None:
        """Args:
        parts: what the batch is split into, for errors.
        exact: another index than -100 can be counted without.
        """
        super().__init__()
        self.ignored = IGNORE_INDEX
        self.counts: list[Tensor] = []
        self._square: list[Tensor] = []  # targets of calls with as many classes as rows
        self._parts, self._exact = parts, exact
        self._eager = ExitStack()

    def __enter__(self) -> Self:
        self._eager.enter_context(uncompiled())  # a graph compiled under this mode would not be reused without it
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._eager.close()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {} if kwargs is None else kwargs
        if func is F.cross_entropy or func is F.nll_loss:
            self._observe(CrossEntropyCall(*args, **given))
            if self.ignored != IGNORE_INDEX:
                if "target" in given:
                    given = {**given, "target": self._filler(given["target"])}
                else:
                    args = (args[0], self._filler(args[1]), *args[2:])
        elif func is F.ctc_loss:
            lengths = given["target_lengths"] if "target_lengths" in given else args[3]
            self.counts.append(torch.tensor(len(lengths)))
        return func(*args, **given)

    @property
    def contrasts(self) -> Tensor | None:
        """The targets of a call that finds row i among all rows, for every i; None without one. Waits for the device."""
        for target in self._square:
            if bool((target == torch.arange(target.shape[0], device=target.device)).all()):
                return target
        return None

    def _filler(self, target: Tensor) -> Tensor:
        """Return the targets of a rank without rows in the form that the user's loss expects; other targets unchanged.

        All are ignored but one, which keeps the mean finite: class 0, or class 1 if the loss ignores 0.
        """
        if target.is_floating_point():
            return target
        ignored = target == IGNORE_INDEX
        is_filler = ignored.any() & (ignored | (target == 0)).all()  # stays on the device: reading it would synchronise
        one = torch.full_like(target, self.ignored).flatten()
        one[-1] = int(self.ignored == 0)
        return torch.where(is_filler, one.view(target.shape), target)

    def _observe(self, call: CrossEntropyCall) -> None:
        """Count the targets of a call that is a mean over them.

        Raises:
            SpecError: for a mean that cannot be combined from those of parts.
        """
        if not call.is_mean_over_classes:
            return
        target, ignore_index = call.target, call.ignore_index
        with untracked():  # not the model's code
            self.counts.append((target != ignore_index).sum())
            rows = target.shape[0] if target.dim() == 1 else 0
            if rows and call.input.shape == (rows, rows):
                self._square.append(target)
        if call.weight is not None:
            raise SpecError(
                f"cross_entropy(weight=...) averages by the weights of the targets' classes, but the means of {self._parts} "
                "are combined by their numbers of targets. Take the sum, and divide by the targets that count: "
                "cross_entropy(output, targets, weight=weight, reduction='sum') / (targets != -100).sum()"
            )
        if ignore_index == IGNORE_INDEX:
            return
        if not self._exact or self.ignored not in (IGNORE_INDEX, ignore_index):
            raise SpecError(
                f"cross_entropy(ignore_index={ignore_index}): the means of {self._parts} are combined by their numbers of "
                f"targets other than {IGNORE_INDEX}. Write targets.masked_fill(targets == {ignore_index}, {IGNORE_INDEX}), "
                "and leave ignore_index out"
            )
        self.ignored = ignore_index
