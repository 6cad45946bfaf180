"""Labels of a loss, batches without a label that counts, and documents packed into a row.

A new document begins where positions restart, as in transformers: the positions 0 1 2 0 1 2 3 are two documents of 3 and
4 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh.errors import SpecError

IGNORE_INDEX = -100
"""The target of what does not count"""


LABEL_NAMES = ("labels", "shift_labels", "targets", "target")
"""Arguments of a model that are labels; ``shift_labels`` are those that the model does not shift itself."""


def targets_key(fields: Mapping[str, Any]) -> str:
    """Return the key of the labels in a batch that is a dict; "" if it has none that is known."""
    found = (name for name in LABEL_NAMES if name != "shift_labels" and isinstance(fields.get(name), Tensor))
    return next(found, "")


def labels_are_shifted(model: nn.Module) -> bool:
    """Return True if a model's own loss uses each position of ``b s`` labels as the target of the one before.

    True unless it names another kind of loss, as ``transformers`` does (``model.loss_type``: masked words, classes, ...), or
    has an encoder apart.
    """
    return getattr(model, "loss_type", None) in (None, "ForCausalLM") and not is_encoder_decoder(model)


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return True if a model has an encoder and a decoder: its labels then differ from the input in length."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


def ensure_one_target(targets: Tensor, count: Tensor, mask: Any = None) -> Tensor:
    """Return targets with at least one that counts: if none does, the last becomes class 0, so that their mean is finite.

    For a part of a batch that has no share in the loss: 0 times its gradient is 0, and 0 times that of a mean over nothing
    is not.

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
