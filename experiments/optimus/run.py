"""``meshfold reproduce optimus``: throughput and largest batch of 2D beside 1D on 4 to 64 GPUs, published and on the clock."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.optimus.claims import claims, page
from experiments.optimus.plot import draw
from experiments.optimus.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Put Optimus' weak scaling beside the clock.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="train 1D and 2D for real on so many ranks, a square (GPUs, if there are as many), and write measured.md instead; "
    "--hidden, --layers and others (see measured.py --help) say how large",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
