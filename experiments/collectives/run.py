"""``meshfold reproduce collectives``: collectives by α–β, fitted and at sizes that the fit has not seen."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.collectives.claims import claims, page
from experiments.collectives.plot import draw
from experiments.collectives.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Fit α–β to collectives, and compare it with sizes that it has not seen.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="measure every collective for real over so many ranks (GPUs, if there are as many), and write measured.md instead; "
    "--sizes says up to how many bytes",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
