"""``meshfold reproduce gpipe``: GPipe's speed-ups and idle time, published and simulated."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.gpipe.claims import claims, page
from experiments.gpipe.plot import draw
from experiments.gpipe.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Put GPipe's published numbers beside simulated ones.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
