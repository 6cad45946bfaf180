"""``meshfold reproduce megatron``: iteration times of Megatron-LM on 32 to 3072 A100s, published and on the planner's clock."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.megatron.claims import claims, page
from experiments.megatron.plot import draw
from experiments.megatron.simulated import everything
from experiments.report import Experiment

FOLDER = Path(__file__).resolve().parent

EXPERIMENT = Experiment(
    name="megatron",
    about="Put the tables of Megatron-LM at SC'21 beside the planner's clock.",
    folder=FOLDER,
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
