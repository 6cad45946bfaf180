"""``meshfold reproduce zero-memory``: model states and traffic of ZeRO's stages, published, by formula and planned."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.report import Experiment
from experiments.zero_memory.claims import claims, page
from experiments.zero_memory.plot import draw
from experiments.zero_memory.simulated import everything

EXPERIMENT = Experiment(
    file=__file__,
    about="Put the tables of ZeRO beside formulas and plans.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
