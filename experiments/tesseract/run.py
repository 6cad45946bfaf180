"""``meshfold reproduce tesseract``: gains of 2.5D over 1D and 2D on 64 GPUs, published and on the clock."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.report import Experiment
from experiments.tesseract.claims import claims, page
from experiments.tesseract.plot import draw
from experiments.tesseract.simulated import everything

EXPERIMENT = Experiment(
    file=__file__,
    about="Put Tesseract's factors beside the clock, and its gradients beside one process.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="train 1D, 2D and 2.5D for real on so many ranks (GPUs, if there are as many), and write measured.md instead; "
    "--hidden, --layers and others (see measured.py --help) say how large",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
