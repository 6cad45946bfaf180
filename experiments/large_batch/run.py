"""``meshfold reproduce large-batch``: LAMB and LARS at large batches beside AdamW and SGD, on a small GPT."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.large_batch.claims import claims, page
from experiments.large_batch.plot import draw
from experiments.large_batch.training import everything
from experiments.report import Experiment

EXPERIMENT = Experiment(
    file=__file__,
    about="Train a small GPT at a batch of 32 and at larger ones, with rates scaled by the root.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    numbers_file="measured.json",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
