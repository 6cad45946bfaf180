"""``meshfold reproduce vit-batch``: largest batch and speed of a vision transformer over 64 GPUs, published and on the clock."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.report import Experiment
from experiments.vit_batch.claims import claims, page
from experiments.vit_batch.plot import draw
from experiments.vit_batch.simulated import everything

EXPERIMENT = Experiment(
    file=__file__,
    about="Put Colossal-AI's chart of a vision transformer beside the clock.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="train the layers under 1D, 2D and 2.5D for real on so many ranks (GPUs, if there are as many), and write measured.md "
    "instead; --hidden, --layers and others (see measured.py --help) say how large",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
