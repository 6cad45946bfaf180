"""``meshfold reproduce patrickstar``: models of up to 18 billion parameters on V100s, published and planned."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.patrickstar.claims import claims, page
from experiments.patrickstar.plot import draw
from experiments.patrickstar.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Put a chart of the largest model and its speed beside plans.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
