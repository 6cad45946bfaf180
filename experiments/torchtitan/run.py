"""``meshfold reproduce torchtitan``: FSDP and tensor parallelism of Llama 3.1 on 8 to 256 H100s, published and planned."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.report import Experiment
from experiments.torchtitan.claims import claims, page
from experiments.torchtitan.plot import draw
from experiments.torchtitan.simulated import everything

EXPERIMENT = Experiment(
    file=__file__,
    about="Put torchtitan's benchmarks of Llama 3.1 beside plans.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="train Llama 3.1 8B for real on so many ranks (GPUs, if there are as many), and write measured.md instead; --layers, "
    "--hidden and others (see measured.py --help) say how large",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
