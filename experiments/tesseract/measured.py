"""One rank of ``meshfold reproduce tesseract --measure N``: 1D, 2D and 2.5D, run for real.

On GPUs the default sizes are those of Optimus: 24 layers of 2048 channels, sequences of 512 tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.tensor_measured import stacks

MEASURED = stacks(__file__, __doc__, ("1d", "2d", "2.5d"), "Tesseract: 2.5D beside 1D and 2D, run for real")
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
