"""``meshfold reproduce megatron-2019``: weak scaling of Megatron-LM on 1 to 512 V100s, published and on the clock."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.megatron_2019.claims import claims, page
from experiments.megatron_2019.plot import draw
from experiments.megatron_2019.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Put Megatron-LM's weak scaling of 2019 beside the clock.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="train the models whose ranks divide so many (GPUs, if there are as many), and write measured.md instead; --narrow, "
    "--shallow and others (see measured.py --help) say how large",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
