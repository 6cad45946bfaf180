"""``meshfold reproduce attention-schemes``: ring, zigzag and Ulysses attention, published, counted and on the clock."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.attention_schemes.claims import claims, page
from experiments.attention_schemes.plot import draw
from experiments.attention_schemes.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Put benchmarks of ring, zigzag and Ulysses attention beside counts and the clock.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="run the schemes for real on so many ranks (GPUs, if there are as many), and write measured.md instead; "
    "--tokens, --heads and others (see measured.py --help) say how large",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
