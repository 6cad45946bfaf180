"""One rank of ``meshfold reproduce vit-batch --measure N``: layers of a vision transformer under 1D, 2D and 2.5D, run for real."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.tensor_measured import stacks

LARGE = {"layers": 8, "hidden": 4096, "heads": 64, "sequence": 197, "batch": 64, "cap": 32}
"""Sizes on GPUs."""

MEASURED = stacks(__file__, __doc__, ("1d", "2d", "2.5d"), "A vision transformer's layers, run for real", LARGE)
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
