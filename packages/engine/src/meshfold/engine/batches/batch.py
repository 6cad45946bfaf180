"""A batch in the form that the model is called with, and its targets.

A batch is a tensor of token ids ``b s``, a dict with ``input_ids`` and ``labels`` (and whatever else the model
takes), or a pair ``(inputs, targets)`` for a ``loss_fn``. The loss is a mean over targets, so ranks are weighted by their
numbers of targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine.batches.loss import FallbackLoss, call_loss_fn
from meshfold.mesh import SpecError, did_you_mean
from meshfold.mesh.model_io import IGNORE_INDEX, LossMean, count_targets, ensure_one_target, targets_key


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's batch, checked and on its device.

    Attributes:
        args: the model's positional arguments.
        kwargs: its keyword arguments.
        given: the batch in the user's form, for ``loss_fn(output, batch)``.
        rows: its size along dim 0.
        targets: the labels that the loss is a mean over; None: rows count instead.
        name: their key in a dict; those that are not called labels are never shifted.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: Any
    rows: int
    targets: Tensor | None
    name: str = "labels"

    @property
    def tokens(self) -> int:
        """Rows times the length of a sequence, if the first input has one: ids ``b s``, features ``b s h``."""
        first = next((v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor) and v.dim()), None)
        if first is None or first.dim() < 2 or (first.dim() == 2 and first.is_floating_point()):
            return self.rows
        return self.rows * first.shape[1]

    def count(self, mean: LossMean, *, device: torch.device, ignored: int = IGNORE_INDEX) -> Tensor:
        """Return how many targets count: a scalar int64 on the device.

        Args:
            mean: what the loss is a mean over.
            device: where the batch is.
            ignored: another target than -100 that does not count.
        """
        if mean is LossMean.NEXT_TOKENS and self.name != "labels":
            mean = LossMean.LABELS
        if self.targets is None or self.targets.is_floating_point():
            return torch.full((), self.rows if self.targets is None else self.targets.shape[0], device=device)
        return count_targets(self.targets, self.rows, mean, ignored).to(device)

    def countable(self, count: Tensor) -> Batch:
        """Return the batch with at least one target that counts: see :func:`meshfold.mesh.model_io.labels.ensure_one_target`.

        Args:
            count: from :meth:`count`.
        """
        if self.targets is None:
            return self
        targets = ensure_one_target(self.targets, count, self.kwargs.get("attention_mask"))
        kwargs, given = self.kwargs, self.given
        if self.name in kwargs:
            kwargs = {**kwargs, self.name: targets}
        if isinstance(given, Mapping) and self.name in given:
            given = {**given, self.name: targets}
        elif isinstance(given, tuple):
            given = (given[0], targets)
        return replace(self, kwargs=kwargs, given=given, targets=targets)


def prepare_batch(
    batch: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    own_loss: bool,
    aligned: bool = True,
    kept: Collection[str] = (),
    ids_by_name: bool = False,
) -> Batch:
    """Check a batch and bring it to the device; floating inputs take the model's dtype.

    Args:
        batch: one of the three forms.
        device: destination.
        dtype: of floating inputs.
        own_loss: a ``loss_fn`` was given: missing labels stay missing.
        aligned: labels ``b s`` belong to the input tokens, not to a decoder with an encoder.
        kept: entries of a dict that keep their dtype, since the loss alone reads them.
        ids_by_name: ``input_ids`` are a keyword argument: see :func:`takes_ids_by_name`.

    Raises:
        SpecError: for a batch that has none of the three forms.
    """

    def move(value: Any, cast: bool = True) -> Any:
        if not isinstance(value, Tensor):
            return value
        wanted = dtype if cast and value.is_floating_point() else value.dtype
        return value.to(device=device, dtype=wanted, non_blocking=True)

    if isinstance(batch, Tensor) and batch.is_floating_point() and own_loss:
        inputs = move(batch)
        return Batch(args=(inputs,), kwargs={}, given=inputs, rows=_rows(batch), targets=None)
    if isinstance(batch, Mapping | Tensor):
        form = batch if isinstance(batch, Mapping) else {"input_ids": batch}
        named = targets_key(form) or "labels"
        fields = {name: move(value, cast=name != "labels" and name not in kept) for name, value in form.items()}
        ids = fields.get("input_ids")
        if ids is not None:
            _check_ids(ids)
            if named not in fields and not own_loss:
                fields["labels"] = _without_padding(ids, fields.get("attention_mask"))
        labels = fields.get("labels")
        if (
            isinstance(labels, Tensor)
            and isinstance(ids, Tensor)
            and labels.dim() > 1
            and aligned
            and not labels.is_floating_point()  # floats may be class scores
            and labels.shape != ids.shape
        ):
            raise SpecError(
                f"labels of shape {tuple(labels.shape)} for input_ids of shape {tuple(ids.shape)}: give one label per token, "
                f"{IGNORE_INDEX} for tokens that do not count"
            )
        targets = fields.get(named)
        rest = {name: value for name, value in fields.items() if ids_by_name or name != "input_ids"}
        return Batch(
            args=() if ids is None or ids_by_name else (ids,),
            kwargs=rest,
            given=fields if isinstance(batch, Mapping) else ids,
            rows=_rows(next((value for value in fields.values() if isinstance(value, Tensor)), None)),
            targets=targets if isinstance(targets, Tensor) else None,
            name=named,
        )
    if isinstance(batch, tuple | list) and len(batch) == 2:
        if not own_loss:
            raise SpecError("a batch of (inputs, targets) needs Engine(..., loss_fn=lambda output, batch: ...)")
        several = isinstance(batch[0], tuple | list)
        args = tuple(move(value) for value in (batch[0] if several else batch[:1]))
        inputs, targets = args if several else args[0], move(batch[1], cast=False)
        return Batch(
            args=args,
            kwargs={},
            given=(inputs, targets),
            rows=_rows(next((value for value in args if isinstance(value, Tensor)), None)),
            targets=targets if isinstance(targets, Tensor) else None,
        )
    raise SpecError(
        f"a batch of type {type(batch).__name__}: give a dict with input_ids and labels, a tensor of token ids, or a "
        "pair (inputs, targets) with a loss_fn"
    )


def inputs(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Batch:
    """Bring the arguments of a direct call to the device, floating tensors in the model's dtype."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else value.dtype, non_blocking=True)

    moved = tuple(move(value) for value in args), {name: move(value) for name, value in kwargs.items()}
    rows = next((v.shape[0] for v in (*moved[0], *moved[1].values()) if isinstance(v, Tensor) and v.dim()), 1)
    return Batch(args=moved[0], kwargs=moved[1], given=None, rows=rows, targets=None)


_INSTEAD = {
    "attention_mask": "leave it out. Rows that are padded on the right need no mask: give labels with -100 where the padding is",
    "labels": "give Engine a loss_fn, which makes the loss of the model's output and the batch",
}


_INSTEAD_BESIDE_LOSS_FN = {"labels": "give a pair (inputs, targets), whose targets go to loss_fn alone"}


def names_taken(model: nn.Module) -> tuple[str, ...] | None:
    """Return the argument names that a model accepts; None: any."""
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return None if takes_all else tuple(parameters)


def takes_ids_by_name(model: nn.Module) -> bool:
    """Return True for a model whose first argument is not its token ids: keywords only, or images before words."""
    parameters = inspect.signature(model.forward).parameters
    of_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = next(
        (one for one in parameters.values() if one.kind in (*of_place, inspect.Parameter.VAR_POSITIONAL)), None
    )
    return first is None or (first.name != "input_ids" and "input_ids" in parameters)


def check_fields(work: Batch, model: nn.Module, taken: Sequence[str] | None, *, own_loss: bool) -> None:
    """Check that a model accepts the names of a batch.

    Args:
        work: the batch.
        model: for its name.
        taken: from :func:`names_taken`.
        own_loss: whether a ``loss_fn`` was given.

    Raises:
        SpecError: for a field that it does not take.
    """
    unknown = [] if taken is None else [name for name in work.kwargs if name not in taken]
    if unknown:
        takes = f"{type(model).__name__} takes {', '.join(taken or ()) or 'nothing'}"
        instead = _INSTEAD_BESIDE_LOSS_FN if own_loss and unknown[0] in _INSTEAD_BESIDE_LOSS_FN else _INSTEAD
        hint = did_you_mean(unknown[0], taken or ())
        advice = instead.get(unknown[0], f"leave it out.{hint}" if hint else "leave it out")
        raise SpecError(f"the model would be called with {unknown[0]!r}, but {takes}: {advice}")


def ignores_labels(model: nn.Module) -> bool:
    """Return True for a Hugging Face model without an argument ``labels``, such as one that answers questions."""
    return hasattr(type(model), "loss_function") and "labels" not in inspect.signature(model.forward).parameters


def takes_cache(model: nn.Module) -> bool:
    """Return True if a Hugging Face model caches keys and values by default.

    A training step does not read them, and with them transformers does not detect packed documents.
    """
    theirs = hasattr(type(model), "loss_function")
    return theirs and "use_cache" in inspect.signature(model.forward).parameters


def loss_of(output: Any, batch: Batch, loss_fn: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """Return the loss that ``loss_fn`` makes of a model's output, or without one the scalar loss in it.

    Raises:
        SpecError: if there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss_fn is not None and (loss is None or not isinstance(loss_fn, FallbackLoss)):
        return call_loss_fn(loss_fn, output, batch.given)
    if loss is None and isinstance(output, Tensor) and output.dim() == 0:
        loss = output
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = (
            f"a loss of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"{type(output).__name__} without a loss"
        )
        raise SpecError(
            f"the model returned {found}: return an output with a scalar .loss, or give Engine(..., loss_fn=lambda "
            "output, batch: ...) that makes one"
        )
    return loss


def _without_padding(ids: Tensor, mask: object) -> Tensor:
    """Return ids as labels, int64; tokens hidden by ``attention_mask`` ``b s`` are ignored."""
    labels = ids.long()
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return labels.masked_fill(mask == 0, IGNORE_INDEX)
    return labels


def _check_ids(ids: Any) -> None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or 0 in ids.shape:
        shape = f"shape {tuple(ids.shape)} and {ids.dtype}" if isinstance(ids, Tensor) else f"type {type(ids).__name__}"
        pair = ""
        if isinstance(ids, Tensor) and ids.is_floating_point():
            pair = "; for a model of other inputs a pair (inputs, targets), and Engine(..., loss_fn=...)"
        raise SpecError(f"input_ids of {shape}: give an int64 tensor [batch, sequence] that is not empty{pair}")


def _rows(value: Tensor | None) -> int:
    if value is None or value.dim() == 0:
        raise SpecError(
            "a batch without a tensor whose first dim is the batch: give one; torch.as_tensor(...) converts an "
            "array or a list"
        )
    if not value.shape[0]:
        raise SpecError(
            f"a batch of 0 rows, of shape {tuple(value.shape)}: give at least one; engine.shard_batch and "
            "engine.dataloader give a rank without rows one that does not count"
        )
    return value.shape[0]
