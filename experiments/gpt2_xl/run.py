"""``meshfold reproduce gpt2-xl``: GPT2-XL on four A100s of 40 GB under DDP, ZeRO-3 and Gemini, published and planned."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.gpt2_xl.claims import claims, page
from experiments.gpt2_xl.plot import draw
from experiments.gpt2_xl.simulated import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Put a benchmark of DDP, ZeRO-3 and Gemini beside plans.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="train it for real on so many ranks (four GPUs are the table's; 40 GB of each are used), and write measured.md "
    "instead; --layers, --hidden and others (see measured.py --help) say how large",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
