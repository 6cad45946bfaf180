"""Micro-batches of a batch: the model's arguments for each, and its weight.

A batch is a tensor of token ids ``b s``, a dict of the model's arguments, or a pair ``(inputs, targets)`` for a ``loss_fn``. The
loss of the batch is the mean over its targets. A micro-batch is therefore weighted by its number of targets that are not -100, or
by its rows without targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshfold.mesh import SpecError
from meshfold.mesh.model_io import LossMean, count_targets, ensure_one_target, loss_mean, targets_key
from meshfold.pipeline.scheduling.build import Programs


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Some rows of a batch.

    Attributes:
        args: the model's positional arguments.
        kwargs: its keyword arguments.
        given: the rows in the user's form, for ``loss_fn(output, given)``.
        first_row: rows of the batch before these.
        first_token: tokens of the batch before these: rows times the length of a sequence.
        rows: of the whole batch.
        weight: its share of the batch's loss: float64 scalar, on the device of the batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: Any
    first_row: int
    first_token: int
    rows: int
    weight: Tensor


def split(
    batch: Any,
    count: int,
    *,
    own_loss: bool = False,
    mean: LossMean = LossMean.NEXT_TOKENS,
    weigh: Callable[[Any], Tensor | float] | None = None,
    unit: int = 1,
) -> list[Microbatch]:
    """Cut a batch into ``count`` parts of equal size; the first ones get the remaining rows.

    Args:
        batch: tensors of it whose first dim is the batch are cut, everything else goes to every part.
        count: at most as many as there are rows.
        own_loss: the loss is a ``loss_fn``'s: labels that are missing stay missing.
        mean: what the model's own loss is a mean over.
        weigh: returns the weight of a part, in the user's form, if targets or rows do not determine it.
        unit: rows that stay together if each part can have at least ``unit`` rows. What splits the batch again, as some tensor
            modes do, pads any other number of rows with rows that do not count.

    Raises:
        SpecError: for a batch in none of the three forms, or with fewer rows than parts.
    """
    rows = rows_of(batch)
    if not 1 <= count <= rows:
        raise SpecError(f"a batch of {rows} rows cannot be cut into {count} micro-batches: give each at least one row")
    sizes = _sizes(rows, count, unit)
    if isinstance(batch, list):
        batch = tuple(batch)
    parts, first = [], 0
    for size in sizes:
        parts.append(tree_map_only(Tensor, partial(_rows, rows=rows, first=first, size=size), batch))
        first += size
    forms = [form(part, own_loss=own_loss) for part in parts]
    counts = [
        torch.as_tensor(weigh(part)).double()
        if weigh is not None
        else _count(args, kwargs, part, size, own_loss=own_loss, mean=mean)
        for (args, kwargs), part, size in zip(forms, parts, sizes, strict=True)
    ]
    if weigh is None:
        parts = [_countable(part, n, own_loss=own_loss) for part, n in zip(parts, counts, strict=True)]
        forms = [form(part, own_loss=own_loss) for part in parts]
    device = next(leaf.device for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    shares = torch.stack([one.to(device) for one in counts]).double()
    if mean is LossMean.SUM and not own_loss and weigh is None:
        shares = (shares > 0).double()
    else:
        shares = shares / shares.sum().clamp(min=1e-300)
    length = _tokens_a_row(forms[0])
    return [
        Microbatch(
            args=args,
            kwargs=kwargs,
            given=part,
            first_row=sum(sizes[:index]),
            first_token=sum(sizes[:index]) * length,
            rows=rows,
            weight=shares[index],
        )
        for index, ((args, kwargs), part) in enumerate(zip(forms, parts, strict=True))
    ]


def _sizes(rows: int, count: int, unit: int) -> list[int]:
    """Return the rows of each part: whole units, the last perhaps short; single rows if there are too few units."""
    unit = unit if count * unit < rows + unit else 1
    groups = -(-rows // unit)
    ends = [unit * (part * (groups // count) + min(part, groups % count)) for part in range(1, count + 1)]
    ends[-1] = rows
    return [stop - start for start, stop in pairwise([0, *ends])]


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch: the first dim of ``input_ids``, else of the largest tensor of a dict, or of the
    first tensor.

    Raises:
        SpecError: if there is none.
    """
    rows = _rows_in(batch)
    if rows is None:
        raise SpecError(
            f"a batch of type {type(batch).__name__} without a tensor that has rows: give token ids, a dict of the model's "
            f"arguments, or a pair (inputs, targets) with a loss_fn"
        )
    return rows


def _rows_in(batch: Any) -> int | None:
    if isinstance(batch, tuple | list):
        return next((rows for part in batch if (rows := _rows_in(part)) is not None), None)
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return _rows_in(batch["input_ids"])
    return max(
        (leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()),
        default=None,
    )


def form(batch: Any, *, own_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that the model is called with for a batch in the user's form.

    Raises:
        SpecError: if it has none of the three forms.
    """
    if isinstance(batch, Tensor):
        if own_loss:
            return (batch,), {}
        if batch.is_floating_point():
            raise SpecError("a batch of floats alone needs loss_fn=lambda output, batch: ...")
        return (batch,), {"labels": batch}
    if isinstance(batch, Mapping):
        fields = dict(batch)
        if "labels" not in fields and not targets_key(fields) and "input_ids" in fields and not own_loss:
            fields["labels"] = fields["input_ids"]
        return (), fields
    if isinstance(batch, tuple) and len(batch) == 2:
        if not own_loss:
            raise SpecError("a batch of (inputs, targets) needs loss_fn=lambda output, batch: ...")
        inputs = batch[0]
        return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}
    raise SpecError(
        f"a batch of type {type(batch).__name__}: give token ids, a dict of the model's arguments, or a pair "
        f"(inputs, targets) with a loss_fn"
    )


def _rows(tensor: Tensor, *, rows: int, first: int, size: int) -> Tensor:
    """Return some rows of a tensor that has all rows; any other tensor unchanged."""
    return tensor[first : first + size] if tensor.dim() and tensor.shape[0] == rows else tensor


def _count(
    args: Sequence[Any], kwargs: Mapping[str, Any], part: Any, rows: int, *, own_loss: bool, mean: LossMean
) -> Tensor:
    """Return the number of a part's targets that count, a scalar."""
    name = targets_key(kwargs)
    targets = part[1] if own_loss and isinstance(part, tuple) else kwargs.get(name)
    if own_loss or (mean is LossMean.NEXT_TOKENS and name != "labels"):
        mean = LossMean.LABELS
    return count_targets(targets if isinstance(targets, Tensor) else None, rows, mean)


def _countable(part: Any, count: Tensor, *, own_loss: bool) -> Any:
    """Return the part with at least one counted target: the gradient of a mean over none is NaN, not 0."""
    if isinstance(part, Mapping) and (name := targets_key(part)):
        return {**part, name: ensure_one_target(part[name], count, part.get("attention_mask"))}
    if own_loss and isinstance(part, tuple) and isinstance(part[1], Tensor):
        return part[0], ensure_one_target(part[1], count)
    return part


def _tokens_a_row(call: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    """Return the length of a sequence of ids ``b s`` or features ``b s h``; 1 without a sequence dim."""
    args, kwargs = call
    first = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim()), None)
    if first is None or first.dim() < 2 or (first.dim() == 2 and first.is_floating_point()):
        return 1
    return first.shape[1]


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Agreements with the data-parallel replicas of a pipeline that share its parameters (ZeRO stage 3); all of them must call.

    Attributes:
        agree_on_count: maps this pipeline's number of micro-batches to the largest of all replicas. None: each has
            its own.
        around_trial: context manager for trial forwards, which one pipeline may run and another not.
    """

    agree_on_count: Callable[[int], int] | None = None
    around_trial: Callable[[], AbstractContextManager[None]] = nullcontext

    def filled(self, works: Sequence[Microbatch]) -> list[Microbatch]:
        """Repeat the last micro-batch, with weight 0, until this replica has as many as the others."""
        if self.agree_on_count is None:
            return [*works]
        nothing = replace(works[-1], weight=torch.zeros_like(works[-1].weight))
        return [*works, *[nothing] * (self.agree_on_count(len(works)) - len(works))]


NO_REPLICAS = Replicas()


class Batches:
    """Cuts batches as a model and its schedules need them."""

    def __init__(
        self,
        model: nn.Module,
        programs: Programs,
        device: torch.device,
        *,
        own_loss: bool,
        weigh: Callable[[Any], Tensor | float] | None,
    ) -> None:
        """Args:
        model: its class determines its arguments and the tokens its loss is a mean over.
        programs: determine the number of micro-batches.
        device: of the micro-batches.
        own_loss: the loss is a ``loss_fn``'s.
        weigh: weight of a micro-batch, if neither labels nor rows determine it.
        """
        self._programs, self._device = programs, device
        self._own_loss, self._weigh = own_loss, weigh
        self._takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._mean = loss_mean(model)

    def to_train(self, batch: Any, *, unit: int = 1) -> list[Microbatch]:
        """Cut a training batch; ``unit``: see :func:`meshfold.pipeline.runtime.microbatch.split`."""
        works = split(
            self._moved(batch),
            self._programs.count(rows_of(batch), unit=unit),
            unit=unit,
            own_loss=self._own_loss,
            mean=self._mean,
            weigh=self._weigh,
        )
        if self._takes_cache:
            for work in works:
                work.kwargs.setdefault("use_cache", False)
        return works

    def to_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, count: int | None = None) -> list[Microbatch]:
        """Cut the arguments of a call for its output, into ``count`` parts if given; all have equal weight."""
        given = self._moved((args, kwargs))
        count = count or self._programs.count(rows_of(given), training=False)
        default = {"use_cache": False} if self._takes_cache else {}
        works = split(given, count, own_loss=True, weigh=lambda part: 1.0)
        return [replace(work, args=work.given[0], kwargs={**default, **work.given[1]}, given=None) for work in works]

    def _moved(self, batch: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), batch)
