"""Labels of a loss, batches without a label that counts, and documents packed into a row.

A new document begins where positions restart at 0, as in transformers: the positions 0 1 2 0 1 2 3 are two documents of 3 and 4
tokens. Positions that go back to q > 0 begin a branch: it continues the first q tokens of its document, and does not see other
branches. So the positions 0 1 2 3 4 2 3 are a prompt of 2 tokens with completions of 3 and of 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh.errors import SpecError

IGNORE_INDEX = -100
"""The target of what does not count"""


_HOST = "_meshfold_on_host"
LABEL_NAMES = ("labels", "shift_labels", "targets", "target")
"""Arguments of a model that are labels; ``shift_labels`` are those that the model does not shift itself."""


def targets_key(fields: Mapping[str, Any]) -> str:
    """Return the key of the labels in a batch that is a dict; "" if it has none that is known."""
    found = (name for name in LABEL_NAMES if name != "shift_labels" and isinstance(fields.get(name), Tensor))
    return next(found, "")


@dataclass(frozen=True, eq=False, slots=True)
class CrossEntropyCall:
    """Arguments of a call of torch's ``cross_entropy`` or ``nll_loss``: ``CrossEntropyCall(*args, **kwargs)``."""

    input: Tensor
    target: Tensor
    weight: Tensor | None = None
    size_average: bool | None = None
    ignore_index: int = IGNORE_INDEX
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @property
    def is_mean_over_classes(self) -> bool:
        """True for a mean whose targets are classes, not probabilities."""
        legacy = (self.size_average, self.reduce)  # override ``reduction``
        is_mean = self.reduction == "mean" if legacy == (None, None) else False not in legacy
        return is_mean and not self.target.is_floating_point()


class LossMean(Enum):
    """Kinds of means that losses are, by which those of ranks and micro-batches are combined."""

    NEXT_TOKENS = "labels other than -100, without the first of each row"
    LABELS = "labels other than -100"
    ROWS = "rows"
    SUM = "nothing: it is a sum over rows"


_NEXT_TOKENS = (None, "ForCausalLM", "ForConditionalGeneration")


def loss_mean(model: nn.Module) -> LossMean:
    """Return what a model's own loss is a mean over, as far as its class tells.

    That of a causal language model, unless it names another kind of loss, as ``transformers`` does (``model.loss_type``: masked
    words, classes, ...), or has an encoder apart.
    """
    kind = getattr(model, "loss_type", None)
    if kind == "ForCTC":
        summed = getattr(getattr(model, "config", None), "ctc_loss_reduction", "mean") == "sum"
        return LossMean.SUM if summed else LossMean.ROWS
    return LossMean.NEXT_TOKENS if kind in _NEXT_TOKENS and not is_encoder_decoder(model) else LossMean.LABELS


def count_targets(targets: Tensor | None, rows: int, mean: LossMean, ignored: int = IGNORE_INDEX) -> Tensor:
    """Return how many targets of a batch count in a loss: a scalar int64, where the targets are.

    Args:
        targets: integers, -100 where none counts; rows are counted instead of floats and of None.
        rows: of the batch.
        mean: what the loss is a mean over.
        ignored: another target than -100 that does not count.
    """
    if targets is None or targets.is_floating_point():
        return torch.tensor(rows)
    if mean in (LossMean.ROWS, LossMean.SUM):  # a rank without rows has one that does not count
        return torch.where((targets == IGNORE_INDEX).all(), int(rows > 1), 1) * rows
    if mean is LossMean.NEXT_TOKENS and targets.dim() > 1:
        targets = targets[:, 1:]
    counts = targets != IGNORE_INDEX
    return (counts if ignored == IGNORE_INDEX else counts & (targets != ignored)).sum()


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return True if a model has an encoder and a decoder: its labels then differ from the input in length."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


def ensure_one_target(targets: Tensor, count: Tensor, mask: Any = None) -> Tensor:
    """Return targets with at least one that counts: if none does, the last becomes class 0, so that their mean is finite.

    For a part of a batch that has no share in the loss: 0 times its gradient is 0, but 0 times the gradient of a mean over nothing
    is NaN.

    Args:
        targets: integers, -100 where none counts; others are not changed.
        count: how many do: a scalar, on whatever device.
        mask: an attention_mask of the same shape, if there is one: then the last that it does not hide.
    """
    if targets.is_floating_point() or not targets.numel():
        return targets
    place = torch.full((), targets.numel() - 1, device=targets.device)  # made on the device: no copy from the host
    if isinstance(mask, Tensor) and mask.shape == targets.shape:
        place = mask.reshape(-1).bool().long().cumsum(0).argmax()
    one = targets.reshape(-1).index_fill(0, place, 0).view(targets.shape)
    return torch.where(count.to(targets.device) > 0, targets, one)


def check_position_ids(position_ids: Tensor | None, input_ids: Tensor) -> None:
    """Raise a SpecError for positions that are not ``b s`` or ``1 s`` integers for ids ``b s``."""
    if position_ids is None:
        return
    rows, length = input_ids.shape
    shape = tuple(position_ids.shape)
    if shape not in ((rows, length), (1, length)) or position_ids.is_floating_point():
        raise SpecError(
            f"position_ids {list(shape)} of {position_ids.dtype} for tokens {[rows, length]}: give integers, one a token, of every "
            "row or of one row for all"
        )


def document_starts(position_ids: Tensor) -> Tensor:
    """Return where documents begin, the first of a row left out: ``b s`` positions -> ``b s`` bool."""
    first = torch.zeros_like(position_ids, dtype=torch.bool)
    first[:, 1:] = position_ids.diff(dim=1) != 1
    return first


def ignore_document_starts(labels: Tensor, position_ids: Tensor) -> Tensor:
    """Return unshifted labels ``b s`` that leave out each document's first token, which no token before it should predict."""
    return labels.masked_fill(document_starts(position_ids), IGNORE_INDEX)


def visible(position_ids: Tensor, window: int | None = None) -> Tensor:
    """Return which tokens see which under causal attention, ``b s`` positions -> ``b s s`` bool: query, key.

    A token sees its own document up to itself; in a branch, its own branch and the tokens that it continues.

    Args:
        position_ids: of each token in its document; see the module.
        window: a token sees itself and ``window - 1`` positions before; None: all before.
    """
    token = torch.arange(position_ids.shape[1], device=position_ids.device)
    starts = document_starts(position_ids)
    run = starts.cumsum(1)
    first = torch.where(starts, token, 0).cummax(1).values
    branch = branch_starts(position_ids).gather(1, first)
    trunk = torch.where(branch, run.gather(1, _last_document(position_ids)), run)
    continued = position_ids.gather(1, first)  # tokens of the trunk that a branch continues
    seen = run[:, :, None] == run[:, None, :]
    seen |= (trunk[:, :, None] == run[:, None, :]) & (position_ids[:, None, :] < continued[:, :, None])
    seen &= token[:, None] >= token
    if window is not None:
        seen &= position_ids[:, :, None] - position_ids[:, None, :] < window
    return seen


def segments_of(position_ids: Tensor) -> list[list[tuple[int, int, int, int]]]:
    """Return the segments of each row, by which tokens see what :func:`visible` says: ``b s`` -> (start, stop, first, kept).

    Tokens start to stop see themselves causally, and the ``kept`` tokens of the row from ``first`` on, which a branch continues.
    Waits for the device of the positions, unless :func:`keep_on_host` was called for them.
    """
    position_ids = position_ids.__dict__.get(_HOST, position_ids).detach().cpu()
    starts = document_starts(position_ids)
    starts[:, :1] = True
    branches, documents = branch_starts(position_ids).tolist(), _last_document(position_ids).tolist()
    found = []
    # Lists, not rows of tensors: a rank may have some of the rows, and which ones does not matter here.
    for row, branch, document, positions in zip(
        starts.tolist(), branches, documents, position_ids.tolist(), strict=True
    ):
        places = [*(place for place, begins in enumerate(row) if begins), len(positions)]
        found.append(
            [(a, b, document[a] if branch[a] else a, positions[a] if branch[a] else 0) for a, b in pairwise(places)]
        )
    return found


def keep_on_host(position_ids: Tensor, host: Tensor) -> None:
    """Let :func:`segments_of` read positions on a device from the tensor on the host that they were copied from."""
    if position_ids.shape == host.shape and position_ids.device != host.device == torch.device("cpu"):
        position_ids.__dict__[_HOST] = host


def branch_starts(position_ids: Tensor) -> Tensor:
    """Return where branches begin: ``b s`` positions -> ``b s`` bool.

    Where positions jump to a number that the document has not reached, another document begins, as in transformers.
    """
    token = torch.arange(position_ids.shape[1], device=position_ids.device)
    starts = document_starts(position_ids)
    document = _last_document(position_ids)
    run = starts.cumsum(1)
    last_of_trunk = torch.where(run == run.gather(1, document), token, 0).cummax(1).values
    tokens = last_of_trunk - document + 1  # of the document's first run
    whole = position_ids.gather(1, document) == 0
    return starts & whole & (position_ids > 0) & (position_ids <= tokens)


def _last_document(position_ids: Tensor) -> Tensor:
    """Return the place of each token's last position 0 that begins a document; the first place without one."""
    token = torch.arange(position_ids.shape[1], device=position_ids.device)
    return torch.where(document_starts(position_ids) & (position_ids == 0), token, 0).cummax(1).values
