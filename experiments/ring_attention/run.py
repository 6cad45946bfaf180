"""``meshfold reproduce ring-attention``: blocks that hide messages and lengths that fit, published, on the clock and planned."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.report import Experiment
from experiments.ring_attention.claims import claims, page
from experiments.ring_attention.plot import draw
from experiments.ring_attention.simulated import everything

EXPERIMENT = Experiment(
    file=__file__,
    about="Put the tables of Ring Attention beside the clock and plans.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="train with ever longer sequences on up to so many ranks (GPUs, if there are as many), and write measured.md "
    "instead; --layers, --hidden and others (see measured.py --help) say how large",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
