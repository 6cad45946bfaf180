"""``meshfold reproduce sequence-parallelism``: ring self-attention's table 4, published, counted, planned and run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.report import Experiment
from experiments.sequence_parallelism.claims import claims
from experiments.sequence_parallelism.plot import draw
from experiments.sequence_parallelism.simulated import everything
from experiments.sequence_parallelism.tables import page

EXPERIMENT = Experiment(
    file=__file__,
    about="Put the ring self-attention paper's numbers beside what is counted, planned and run here.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="run weak scaling for real on up to so many ranks (GPUs, if there are as many), and write measured.md "
    "instead; --hidden, --batch and others (see measured.py --help) say how large",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
