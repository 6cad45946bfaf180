"""``meshfold reproduce three-d``: gains of 3D over 1D and 2D on 64 GPUs, published and on the clock, and its gradients."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.report import Experiment
from experiments.three_d.claims import claims, page
from experiments.three_d.plot import draw
from experiments.three_d.simulated import everything

EXPERIMENT = Experiment(
    file=__file__,
    about="Put 3D parallelism's factors beside the clock, and its gradients beside one process.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
