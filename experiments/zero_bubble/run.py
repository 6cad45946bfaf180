"""``meshfold reproduce zero-bubble``: the zero-bubble paper's rates and throughputs, published and simulated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.report import Experiment
from experiments.zero_bubble.claims import claims
from experiments.zero_bubble.plot import draw
from experiments.zero_bubble.simulated import AUTO_RANKS, everything
from experiments.zero_bubble.tables import page

EXPERIMENT = Experiment(
    file=__file__,
    about="Put the zero-bubble paper's published numbers beside simulated ones.",
    simulate=everything,
    claims=claims,
    page=page,
    draw=draw,
    measures="run the schedules for real on so many ranks (GPUs, if there are as many), and write measured.md instead; "
    "--layers, --hidden and others (see measured.py --help) say how large",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment.

    Returns:
        0 if every claim came out as the page says, else 1.
    """
    arguments = EXPERIMENT.arguments()
    arguments.add_argument(
        "--auto-ranks",
        type=int,
        default=AUTO_RANKS,
        help="search with auto for pipelines of up to so many ranks (default 8; 16 and 32 take minutes)",
    )
    options = EXPERIMENT.parse(argv, arguments)
    return replace(EXPERIMENT, simulate=partial(everything, options.auto_ranks)).run(options)


if __name__ == "__main__":
    sys.exit(main())
