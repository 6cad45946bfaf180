"""Documents packed into the rows of a batch, as models of the Hugging Face kind are told of them.

Their ``position_ids`` begin anew at each document, and attention keeps to documents where no attention_mask is given
(transformers, ``masking_utils.find_packed_sequence_indices``). A batch of one row may bring ``cu_seq_lens_q`` and its like as
well, as ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` makes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.mesh import SpecError

_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LENGTHS = ("max_length_q", "max_length_k")

Documents = tuple[tuple[int, ...], ...]
"""of every row, or of all rows alike: cumulative lengths of its documents"""


def packed_documents(given: dict[str, Any], rows: int, length: int) -> Documents | None:
    """The documents of a batch; None if each row is one that begins at position 0.

    Args:
        given: the model's arguments. What says nothing, or the same once more, is taken out.
        rows: of the batch.
        length: tokens of a row.

    Raises:
        SpecError: for what contradicts itself, or does not say which tokens a document has.
    """
    by_positions = _by_positions(given, rows, length)
    bounds = [given.pop(name) for name in _BOUNDS if isinstance(given.get(name), Tensor)]
    for name in _LENGTHS:
        given.pop(name, None)
    if not bounds:
        return by_positions
    said = {tuple(int(bound) for bound in one.tolist()) for one in bounds}
    found = (next(iter(said)),)
    told = by_positions or ((0, length),)
    if len(said) > 1 or found != told or rows > 1:
        raise SpecError(
            f"{_BOUNDS[0]}={list(found[0])} with {rows} × {length} tokens, whose position_ids begin anew at "
            f"{[list(row[:-1]) for row in told]}: give position_ids that begin anew at each document and leave {_BOUNDS[0]} out, "
            "or let both say the same of one row"
        )
    return by_positions


def _by_positions(given: dict[str, Any], rows: int, length: int) -> Documents | None:
    positions = given.get("position_ids")
    if not isinstance(positions, Tensor):
        return None
    if positions.dim() != 2 or positions.shape[1] != length or positions.shape[0] not in (1, rows):
        raise SpecError(
            f"position_ids {list(positions.shape)} for tokens {[rows, length]}: where a sequence is split, each token has its own"
        )
    if bool((positions == torch.arange(length, device=positions.device)).all()):
        given["position_ids"] = None
        return None
    starts = positions.diff(dim=1) != 1
    found = tuple((0, *(row.nonzero().flatten() + 1).tolist(), length) for row in starts.cpu())
    return found[:1] if len(set(found)) == 1 else found
