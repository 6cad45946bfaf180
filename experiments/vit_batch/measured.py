"""One rank of ``meshfold reproduce vit-batch --measure N``: layers of a vision transformer under 1D, 2D and 2.5D, run for real."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from experiments.tensor_measured import measure

LARGE = {"layers": 8, "hidden": 4096, "heads": 64, "sequence": 197, "batch": 64, "cap": 32}
"""Sizes on GPUs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on this rank; rank 0 writes measured.json and measured.md."""
    words = list(sys.argv[1:] if argv is None else argv)
    if torch.cuda.is_available():
        words = [f"--{name}={value}" for name, value in LARGE.items()] + words
    return measure(
        words, __doc__, Path(__file__).parent, ("1d", "2d", "2.5d"), "A vision transformer's layers, run for real"
    )


if __name__ == "__main__":
    sys.exit(main())
