"""Rows of token ids: documents packed into rows of one length, pairs side by side in one, completions one by one.

Positions restart at 0 with each document of a row, which keeps attention within documents. Completions that share their
prompt lie behind it in one row: positions go back to the prompt's last token, which predicts the first token of each completion,
so it is there once for each (:func:`meshfold.mesh.model_io.visible`). Every rank makes the same rows of the global batch; the
engine takes its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.align.records import Completion, Preference
from meshfold.mesh import SpecError
from meshfold.mesh.model_io import IGNORE_INDEX

CHOSEN, REJECTED = 1, 2
"""Values of the field ``branch``: tokens of the chosen and of the rejected completion; 0 for all others."""
_ALIGNED = 16


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
    return _rows([[(documents[number], 0) for number in row] for row in rows], length)


def completion_rows(completions: Sequence[Completion], length: int | None = None) -> dict[str, Tensor]:
    """Return completions in a row each, padded to the longest.

    Args:
        completions: one at least.
        length: cut them at their end to so many tokens; None: leave them whole.
    """
    longest = max(len(one.ids) for one in completions)
    return _rows([[(one, 0)] for one in completions], max(2, longest if length is None else min(length, longest)))


def pair_rows(pairs: Sequence[Preference], length: int | None = None, *, shared: bool = False) -> dict[str, Tensor]:
    """Return pairs in a row each: the prompt with the chosen completion, then the prompt with the rejected one.

    So the two always lie on one rank and in one micro-batch.

    Args:
        pairs: one at least.
        length: most tokens of one of the two; longer ones are cut at their end. None: none is cut.
        shared: the rejected completion continues the prompt of the chosen one, instead of a prompt of its own.

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
    kept = [max(shared_tokens(both) - 1, 0) if shared else 0 for both in cut]  # tokens that are there once
    found = _rows(
        [[(a, 0), (b, k)] for (a, b), k in zip(cut, kept, strict=True)],
        aligned(max(2, max(len(a.ids) + len(b.ids) - k for (a, b), k in zip(cut, kept, strict=True)))),
    )
    branch = torch.zeros_like(found["labels"])
    for row, ((chosen, rejected), skipped) in enumerate(zip(cut, kept, strict=True)):
        end = len(chosen.ids) + len(rejected.ids) - skipped
        branch[row, : len(chosen.ids)] = CHOSEN
        branch[row, len(chosen.ids) : end] = REJECTED
    branch[found["labels"] == IGNORE_INDEX] = 0
    margin = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64)
    return {**found, "branch": branch, "margin": margin}


def group_rows(completions: Sequence[Completion], group: int) -> dict[str, Tensor]:
    """Return groups of completions of one prompt in a row each, which has the prompt once.

    Args:
        completions: with their prompt, one group behind the other.
        group: completions of each.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, ``groups s`` each; ``places``, ``groups group length``: where in the row the
        tokens of each completion lie, with its prompt, -1 behind its end.
    """
    groups = [completions[first : first + group] for first in range(0, len(completions), group)]
    kept = [max(shared_tokens(each) - 1, 0) for each in groups]
    parts = [
        [(one, k if number else 0) for number, one in enumerate(each)] for each, k in zip(groups, kept, strict=True)
    ]
    sizes = [sum(len(one.ids) - k for one, k in row) for row in parts]
    places = torch.full((len(groups), group, max(len(one.ids) for one in completions)), -1, dtype=torch.int64)
    for row, documents in enumerate(parts):
        start = 0
        for number, (one, skipped) in enumerate(documents):
            size = len(one.ids)
            places[row, number, :skipped] = torch.arange(skipped)
            places[row, number, skipped:size] = torch.arange(start, start + size - skipped)
            start += size - skipped
    # Longer than a group, so that no dim of the row is taken for the group's.
    return {**_rows(parts, aligned(max(2, group + 1, *sizes))), "places": places}


def longest_of(pairs: Sequence[Preference], length: int | None = None) -> int:
    """Return the tokens of the longest completion of pairs, with its prompt, cut to ``length``."""
    longest = max((len(one.ids) for pair in pairs for one in (pair.chosen, pair.rejected)), default=0)
    return longest if length is None else min(longest, length)


def shared_tokens(completions: Sequence[Completion]) -> int:
    """Return how many leading tokens completions share, without tokens that count and without any completion's last token."""
    most = min(len(one.ids) for one in completions) - 1
    for place in range(most):
        if any(one.counts[place] for one in completions) or len({one.ids[place] for one in completions}) > 1:
            return place
    return max(most, 0)


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a batch that is passed to the model, without fields that only a loss reads."""
    return {name: batch[name] for name in ("input_ids", "labels", "position_ids") if name in batch}


def shuffled(count: int, step: int, batch: int, seed: int) -> list[int]:
    """Return the numbers of the examples of a step: all of them once in an epoch, in a new order each.

    It depends on its arguments alone, so a resumed run continues where it stopped, on any number of ranks.

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


def aligned(length: int) -> int:
    """Return a long row's length with padding: kernels are faster for multiples of 16 tokens."""
    return length if length <= 8 * _ALIGNED else -(-length // _ALIGNED) * _ALIGNED


def _cut(one: Completion, length: int | None) -> Completion:
    if length is None or len(one.ids) <= length:
        return one
    return Completion(ids=one.ids[:length], counts=one.counts[:length], good=one.good)


def _rows(rows: Sequence[Sequence[tuple[Completion, int]]], length: int) -> dict[str, Tensor]:
    """Return rows of documents, each without its first tokens that the row has already; the rest of a row does not count."""
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORE_INDEX)
    positions = torch.zeros_like(ids)
    for row, documents in enumerate(rows):
        start = 0
        for document, skipped in documents:
            size = min(len(document.ids) - skipped, length - start)
            here, part = slice(start, start + size), slice(skipped, skipped + size)
            tokens: Any = torch.tensor(document.ids[part])
            ids[row, here] = tokens
            counts = torch.tensor(document.counts[part])
            counts[:1] = False  # no token before it predicts it
            labels[row, here] = torch.where(counts, tokens, IGNORE_INDEX)
            positions[row, here] = torch.arange(skipped, skipped + size)
            start += size
        positions[row, start:] = torch.arange(length - start)
    return dict(input_ids=ids, labels=labels, position_ids=positions)
