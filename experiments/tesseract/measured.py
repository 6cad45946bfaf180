"""One rank of ``meshfold reproduce tesseract --measure N``: 1D, 2D and 2.5D, run for real.

On GPUs the default sizes are those of Optimus: 24 layers of 2048 channels, sequences of 512 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.tensor_measured import measure


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on this rank; rank 0 writes measured.json and measured.md."""
    return measure(
        argv, __doc__, Path(__file__).parent, ("1d", "2d", "2.5d"), "Tesseract: 2.5D beside 1D and 2D, run for real"
    )


if __name__ == "__main__":
    sys.exit(main())
