"""``python -m integration_tests.damage``: damage files at random, and keep the counts."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from integration_tests.damage.hunt import RESULTS, hunt
from integration_tests.damage.subjects import subjects


def main(argv: list[str]) -> int:
    """Exit code 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.damage", description=__doc__)
    parser.add_argument("--damages", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first one's")
    parser.add_argument("--write", nargs="?", const=str(RESULTS), metavar="FILE", help="keep the counts as JSON")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        found = hunt(Path(scratch), subjects(Path(scratch)), range(asked.seed, asked.seed + asked.damages))
    if asked.write:
        found.write(Path(asked.write), asked.seed)
    print(f"{found.damages} damages, {len(found.findings)} findings", *found.findings, sep="\n")
    return 1 if found.findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
