"""``meshfold reproduce selective-recompute``: memory and time of selective recomputation, published, counted and on the clock."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.report import Experiment
from experiments.selective_recompute.claims import claims, page
from experiments.selective_recompute.plot import draw
from experiments.selective_recompute.simulated import everything

EXPERIMENT = Experiment(
    file=__file__,
    about="Put the tables on selective recomputation beside counts and the clock.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
