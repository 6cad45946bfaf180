"""``meshfold reproduce auto-checkpointing``: recomputation under a budget of memory, published and as the planner chooses it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.auto_checkpointing.claims import claims, page
from experiments.auto_checkpointing.plot import draw
from experiments.auto_checkpointing.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Put Colossal-AI's automatic checkpointing beside recompute='auto'.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="train under budgets for real on so many ranks (one GPU is the chart's), and write measured.md instead; "
    "--layers, --hidden and others (see measured.py --help) say how large",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
