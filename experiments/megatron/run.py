"""``meshfold reproduce megatron``: iteration times of Megatron-LM on 32 to 3072 A100s, published and on the planner's clock."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.megatron.claims import claims, page
from experiments.megatron.plot import draw
from experiments.megatron.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Put the tables of Megatron-LM at SC'21 beside the planner's clock.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
