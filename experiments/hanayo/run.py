"""``meshfold reproduce hanayo``: Hanayo's idle time by waves, published and simulated."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.hanayo.claims import claims, page
from experiments.hanayo.plot import draw
from experiments.hanayo.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Put what is known of Hanayo's numbers beside simulated ones.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
