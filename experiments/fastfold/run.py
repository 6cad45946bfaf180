"""``meshfold reproduce fastfold``: FastFold's training time, traffic, memory, lengths and gradients, published and ours."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.fastfold.claims import claims
from experiments.fastfold.plot import draw
from experiments.fastfold.simulated import everything
from experiments.fastfold.tables import page
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Put FastFold's published numbers beside computed, counted and simulated ones.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="run blocks under axial parallelism on up to so many ranks (GPUs, if there are as many), and write measured.md "
    "instead; --blocks, --shrink and others (see measured.py --help) say how large",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
