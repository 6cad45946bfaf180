"""``meshfold reproduce gemini-ablation``: what prefetching, a cache and an optimizer on both sides add, on the clock."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.gemini_ablation.claims import claims, page
from experiments.gemini_ablation.plot import draw
from experiments.gemini_ablation.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Add the techniques of Gemini and Elixir one after the other, on the clock.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="train under every placement for real on so many ranks (GPUs, if there are as many), and write measured.md instead; "
    "--layers, --hidden and others (see measured.py --help) say how large",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
