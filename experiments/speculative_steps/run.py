"""``meshfold reproduce speculative-steps``: optimizer steps made before the norm is known, published, on the clock and trained."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.report import Experiment
from experiments.speculative_steps.claims import claims, page
from experiments.speculative_steps.plot import draw
from experiments.speculative_steps.simulated import everything

EXPERIMENT = Experiment(
    file=__file__,
    about="Put optimizer steps made before the norm is known beside SuperOffload's and ZenFlow's.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
