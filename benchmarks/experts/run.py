"""Mixtures of experts of Qwen3-30B-A3B's shape: a layer beside a dense one, a model beside transformers and torchtitan.

`meshfold bench experts --case layer` times one layer on one GPU, in rounds, in one process. `--case model --ranks 2` trains eight
layers with experts over the ranks, each contestant in processes of its own. Both write JSON with times, power and memory;
`--report FILE.json` makes the table from it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks.wheels import add_wheels, unpacked

CASES = ("layer", "model")


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench experts`."""
    parser = argparse.ArgumentParser(prog="meshfold bench experts", description=__doc__.split("\n")[0], add_help=False)
    parser.add_argument("--case", choices=CASES, default="layer")
    add_wheels(parser)
    parser.add_argument("--report", type=Path)
    known, rest = parser.parse_known_args(argv)
    if known.report:  # the file tells its case
        rest = [*rest, "--report", str(known.report)]
        if "cases" in json.loads(known.report.read_text()):
            known.case = "model"
    with unpacked(known.wheels):
        from benchmarks.experts import layer, model

        return layer.main(rest) if known.case == "layer" else model.main(rest)


def add_case(parser: argparse.ArgumentParser) -> None:
    """Name in the help of a case what is read before it: ``--case`` and ``--wheels``."""
    parser.add_argument("--case", choices=CASES, default="layer", help="what is timed")
    add_wheels(parser)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
