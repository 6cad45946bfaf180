"""Confidence of a predicted structure: aligned errors, pTM and ipTM, from the logits of bins of errors.

Source: Jumper et al. 2021, supplement 1.9.7; Evans et al. 2022 for ipTM. A row of pairs needs no other one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshfold.folding import PairRows, rows_bytes

BINS = 64
"""of errors, in both models; more than a number of a pair in memory"""


def confidence_of_rows(
    rows: PairRows, head: Callable[[Tensor], Tensor], kept: Tensor, lengths: Sequence[int], largest: float
) -> tuple[Tensor, float, float | None]:
    """Return predicted aligned errors, pTM and ipTM (None with one chain), on all ranks. Logits exist for some rows at a time.

    Args:
        rows: this rank's pairs, of one protein.
        head: from pairs to logits of the bins of aligned errors, ``row residue bin``.
        kept: indices of the residues that count.
        lengths: of the chains that these are.
        largest: where the last bin begins, in Å.
    """
    residues = rows.pairs.shape[2]
    columns = chain_numbers(lengths, kept.device)
    chains = columns.new_full((residues,), -1)
    chains[kept] = columns
    mine = rows.take(chains, 0)

    def compute(first: int, size: int) -> Tensor:
        logits = head(rows.pairs[0, first : first + size][:, kept]).float()
        return row_confidence(logits, mine[first : first + size], columns, largest)

    return _scores(rows.run(compute, 0, line_bytes(rows.pairs))[kept], lengths)


def row_confidence(logits: Tensor, rows: Tensor, columns: Tensor, largest: float) -> Tensor:
    """Return of each row the predicted aligned errors, its mean score, and that over other chains: ``i (j + 2)``.

    Args:
        logits: ``i j bin``.
        rows, columns: numbers of chains.
        largest: where the last bin begins, in Å.
    """
    bins, n = logits.shape[-1], logits.shape[1]
    step = largest / (bins - 2)
    centers = (torch.arange(bins, device=logits.device, dtype=logits.dtype) + 0.5) * step
    probabilities = logits.softmax(-1)
    scale = 1.24 * (max(n, 19) - 15) ** (1 / 3) - 1.8
    scores = (probabilities / (1 + (centers / scale) ** 2)).sum(-1)
    apart = (rows.unsqueeze(1) != columns).to(scores.dtype)
    between = (scores * apart).sum(-1) / apart.sum(-1).clamp(min=1.0)
    return torch.cat([probabilities @ centers, scores.mean(-1, keepdim=True), between.unsqueeze(-1)], -1)


def confidence_bytes(pairs: Tensor, ranks: int) -> int:
    """Return the bytes of pairs and confidences while :func:`confidence_of_rows` runs.

    Args:
        pairs: of a rank, as ``rows.pairs``.
        ranks: that share the rows.
    """
    lines, residues = pairs.shape[1:3]
    return rows_bytes(pairs, line_bytes(pairs)) + 4 * (residues + 2) * (lines + lines * ranks + residues)


def line_bytes(pairs: Tensor) -> int:
    """Return the bytes of what is made of a row of pairs ``b i j c``: kept columns, logits, their probabilities and scores."""
    return pairs.shape[2] * (pairs.shape[3] * pairs.element_size() + BINS * (pairs.element_size() + 3 * 4))


def chain_numbers(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the number of each residue's chain."""
    return torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))


def _scores(found: Tensor, lengths: Sequence[int]) -> tuple[Tensor, float, float | None]:
    pae, means, between = found.split([found.shape[-1] - 2, 1, 1], -1)
    return pae, float(means.max()), float(between.max()) if len(lengths) > 1 else None
