"""``meshfold reproduce megascale``: MFU of MegaScale and Megatron-LM on 256 to 12,288 GPUs, published and on the clock."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.megascale.claims import claims, page
from experiments.megascale.plot import draw
from experiments.megascale.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Put the tables of MegaScale beside the clock.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
