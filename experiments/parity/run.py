"""``meshfold reproduce parity``: losses of a small GPT under every spec, trained on CPU ranks beside one process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.parity.claims import claims, page
from experiments.parity.plot import draw
from experiments.parity.training import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Train a small GPT under every spec, and put its losses beside those of one process.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    numbers_file="trained.json",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
