"""``meshfold reproduce largest-model``: 24 billion parameters on one GPU of 40 GB, published and planned."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.largest_model.claims import claims, page
from experiments.largest_model.plot import draw
from experiments.largest_model.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Put a benchmark of the largest model on one GPU beside plans.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
