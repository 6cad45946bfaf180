"""Rows of token ids: documents packed into rows of one length, pairs side by side in one, completions one by one.

Documents of a row are told by positions that begin anew with each, so attention stays within them. Every rank makes the same rows
of the global batch; the engine takes its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.align.records import Completion, Preference
from meshfold.mesh import SpecError
from meshfold.mesh.model_io import IGNORE_INDEX

__all__ = ["CHOSEN", "REJECTED", "completion_rows", "model_inputs", "pack", "pair_rows", "shuffled"]

CHOSEN, REJECTED = 1, 2
"""Values of the field ``branch``: tokens of the chosen and of the rejected completion; 0 for all others."""


def pack(documents: Sequence[Completion], length: int) -> dict[str, Tensor]:
    """Return documents in as few rows as best-fit decreasing finds: the longest first, each into the fullest row that has room.

    Args:
        documents: those longer than a row are cut at their end.
        length: tokens of a row.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, ``rows length`` each.

    Raises:
        SpecError: for no documents, or a length below 2.
    """
    if length < 2 or not documents:
        raise SpecError(
            f"{len(documents)} documents in rows of {length} tokens: give one, and rows of 2 tokens at least"
        )
    rows: list[list[int]] = []
    room: list[int] = []
    sizes = [min(len(document.ids), length) for document in documents]
    for number in sorted(range(len(documents)), key=lambda n: (-sizes[n], n)):
        fits = [row for row, free in enumerate(room) if free >= sizes[number]]
        if fits:
            row = min(fits, key=lambda r: room[r])
            rows[row].append(number)
            room[row] -= sizes[number]
        else:
            rows.append([number])
            room.append(length - sizes[number])
    return _rows([[documents[number] for number in row] for row in rows], length)


def completion_rows(completions: Sequence[Completion], length: int | None = None) -> dict[str, Tensor]:
    """Return completions in a row each, padded to the longest.

    Args:
        completions: one at least.
        length: cut them at their end to so many tokens; None: leave them whole.
    """
    longest = max(len(one.ids) for one in completions)
    return _rows([[one] for one in completions], max(2, longest if length is None else min(length, longest)))


def pair_rows(pairs: Sequence[Preference], length: int | None = None) -> dict[str, Tensor]:
    """Return pairs in a row each: the prompt with the chosen completion, then the prompt with the rejected one.

    So the two always lie on one rank and in one micro-batch.

    Args:
        pairs: one at least.
        length: most tokens of one of the two; longer ones are cut at their end. None: none is cut.

    Returns:
        ``input_ids``, ``labels``, ``position_ids`` and ``branch``, ``rows s`` each; ``margin``, ``rows``.

    Raises:
        SpecError: if a prompt leaves no room for a completion in ``length`` tokens.
    """
    cut = [(_cut(pair.chosen, length), _cut(pair.rejected, length)) for pair in pairs]
    if length is not None and (lost := sum(not any(one.counts) for both in cut for one in both)):
        raise SpecError(
            f"{lost} completions begin behind token {length} of their row: give longer rows, or shorter prompts"
        )
    found = _rows(cut, max(2, max(len(a.ids) + len(b.ids) for a, b in cut)))
    branch = torch.zeros_like(found["labels"])
    for row, (chosen, rejected) in enumerate(cut):
        branch[row, : len(chosen.ids)] = CHOSEN
        branch[row, len(chosen.ids) : len(chosen.ids) + len(rejected.ids)] = REJECTED
    branch[found["labels"] == IGNORE_INDEX] = 0
    margin = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64)
    return {**found, "branch": branch, "margin": margin}


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model is called with of a batch, without what a loss reads."""
    return {name: batch[name] for name in ("input_ids", "labels", "position_ids") if name in batch}


def shuffled(count: int, step: int, batch: int, seed: int) -> list[int]:
    """Return the numbers of the examples of a step: all of them once in an epoch, in a new order each.

    A function of its arguments alone, so a run that is resumed goes on where it was, on any number of ranks.

    Args:
        count: examples.
        step: from 0.
        batch: examples a step.
        seed: of the order.
    """
    found: list[int] = []
    for place in range(step * batch, (step + 1) * batch):
        epoch, at = divmod(place, count)
        if not found or at == 0 or place == step * batch:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
        found.append(order[at])
    return found


def _cut(one: Completion, length: int | None) -> Completion:
    if length is None or len(one.ids) <= length:
        return one
    return Completion(ids=one.ids[:length], counts=one.counts[:length], good=one.good)


def _rows(rows: Sequence[Sequence[Completion]], length: int) -> dict[str, Tensor]:
    """Return rows of documents; what is left of a row is a document of its own that does not count."""
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORE_INDEX)
    positions = torch.zeros_like(ids)
    for row, documents in enumerate(rows):
        start = 0
        for document in documents:
            size = min(len(document.ids), length - start)
            here = slice(start, start + size)
            tokens: Any = torch.tensor(document.ids[:size])
            ids[row, here] = tokens
            counts = torch.tensor(document.counts[:size])
            counts[:1] = False  # no token of the document predicts its first
            labels[row, here] = torch.where(counts, tokens, IGNORE_INDEX)
            positions[row, here] = torch.arange(size)
            start += size
        positions[row, start:] = torch.arange(length - start)
    return dict(input_ids=ids, labels=labels, position_ids=positions)
