"""All numbers of the experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.fastfold import gradients, memory, overlap, settings, traffic, training
from experiments.report import read_csv

RANKS = (2, 4, 8)


def everything(ranks: Sequence[int] = RANKS) -> dict[str, Any]:
    """All numbers, for one rank and for each number of ranks."""
    phases = settings.phases()
    return {
        "training": training.everything(phases),
        "traffic": traffic.everything(phases, ranks),
        "kept": memory.kept(phases, (1, *ranks)),
        "overlap": overlap.everything(phases, (1, *ranks)),
        "lengths": memory.lengths((1, *ranks), published_lengths()),
        "gradients": gradients.everything(),
    }


def published_lengths() -> list[int]:
    """Residues of the chains whose times are published."""
    return [int(row["residues"]) for row in read_csv(settings.FOLDER / "published_lengths.csv")]
