"""Documents packed into a row, told by positions that begin anew.

As in transformers: the positions 0 1 2 0 1 2 3 are two documents of 3 and 4 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.mesh.errors import SpecError
from meshfold.mesh.model_io.labels import IGNORE_INDEX


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
    """``b s`` positions -> ``b s`` bool: where a document begins, the first of the row left out."""
    first = torch.zeros_like(position_ids, dtype=torch.bool)
    first[:, 1:] = position_ids.diff(dim=1) != 1
    return first


def ignore_document_starts(labels: Tensor, position_ids: Tensor) -> Tensor:
    """Labels ``b s``, not shifted, that leave out each document's first token: none before it should predict it."""
    return labels.masked_fill(document_starts(position_ids), IGNORE_INDEX)
