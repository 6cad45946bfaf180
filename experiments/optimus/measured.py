"""One rank of ``meshfold reproduce optimus --measure N``: 1D and 2D on a square number of ranks, run for real.

On four GPUs the default sizes are those of the paper's code: 24 layers of 2048 channels, sequences of 512 tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.tensor_measured import stacks

MEASURED = stacks(__file__, __doc__, ("1d", "2d"), "Optimus: 2D beside 1D, run for real")
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
