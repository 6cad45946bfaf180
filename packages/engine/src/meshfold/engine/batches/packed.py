"""Documents packed into the rows of a batch, in the form of Hugging Face models and our own.

Their ``position_ids`` restart at each document, and attention stays within documents if no attention_mask is given
(transformers, ``masking_utils.find_packed_sequence_indices``). Positions that go back to q > 0 begin a branch, which continues
the first q tokens of its document (:mod:`meshfold.engine.batches.branches`). A batch of one row may also have
``cu_seq_lens_q`` and the like, as from ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import SpecError
from meshfold.mesh.model_io import branch_starts, document_starts, ignore_document_starts

_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LENGTHS = ("max_length_q", "max_length_k")

Documents = tuple[tuple[int, ...], ...]
"""of every row, or of all rows alike: cumulative lengths of its documents"""


def packed_documents(given: dict[str, Any], rows: int, length: int) -> Documents | None:
    """Return the documents of a batch; None if each row is one document that starts at position 0.

    Args:
        given: the model's arguments. Redundant ones are removed.
        rows: of the batch.
        length: tokens of a row.

    Raises:
        SpecError: for contradictions, or if the tokens of a document are unknown.
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
            f"{_BOUNDS[0]}={list(found[0])} with {rows} × {length} tokens, whose position_ids restart at "
            f"{[list(row[:-1]) for row in told]}: give position_ids that restart at each document and leave {_BOUNDS[0]} out, "
            "or make both agree, for a single row"
        )
    return by_positions


class OwnDocuments:
    """Documents packed into the rows of a batch, for a model of our own, checked before anything runs.

    Positions have to count the tokens of each document from 0, and labels leave out each document's first token. Then the loss
    of a batch and the weight of a rank's batch are those of separate documents.
    """

    def __init__(self, model: nn.Module, *, own_loss: bool) -> None:
        """Args:
        model: says whether its attention stays within documents, and how many positions it has.
        own_loss: the engine has a ``loss_fn``: labels that are missing stay missing.
        """
        self._keeps = any(hasattr(module, "makes_masks") for module in model.modules())
        config = getattr(model, "config", None)
        self._longest = getattr(config, "learned_positions", None)
        self._own_loss = own_loss

    def settle(self, batch: Any) -> Any:
        """Return the batch in the same form; unchanged without documents, or if the model is not ours.

        Raises:
            SpecError: for positions that do not count each document's tokens from 0, or more than the model has.
        """
        if not self._keeps or not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            return batch
        ids: Tensor = batch["input_ids"]
        if ids.dim() != 2 or not any(name in batch for name in ("position_ids", *_BOUNDS, *_LENGTHS)):
            return batch
        given = dict(batch)
        rows, length = ids.shape
        documents = packed_documents(given, rows, length)
        if documents is None:
            given.pop("position_ids", None)
            return given
        positions: Tensor = given["position_ids"]
        self._check(positions.cpu())
        labels = given.get("labels", None if self._own_loss else ids)
        if isinstance(labels, Tensor) and labels.shape == ids.shape:
            given["labels"] = ignore_document_starts(labels, positions)
        return given

    def _check(self, positions: Tensor) -> None:
        starts = document_starts(positions)
        starts[:, 0] = True
        wrong = starts & (positions != 0) & ~branch_starts(positions)
        if wrong.any():
            row, token = wrong.nonzero()[0].tolist()
            raise SpecError(
                f"position_ids of row {row} have {int(positions[row, token])} at token {token}, where a document begins: "
                "count the tokens of each document from 0"
            )
        longest = positions.max(1)
        row = int(longest.values.argmax())
        tokens = int(longest.values[row]) + 1
        if self._longest is not None and tokens > self._longest:
            raise SpecError(
                f"row {row} has a document of {tokens} tokens, but the model has only "
                f"{self._longest} learned positions: cut it, or give the model max_positions={tokens}"
            )


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
