"""Mixtures of experts of Qwen3-30B-A3B's shape: a layer beside a dense one, a model beside transformers and torchtitan.

`meshfold bench experts --case layer` times one layer on one GPU, in rounds, in one process. `--case model --ranks 2` trains eight
layers with experts over the ranks, each contestant in processes of its own. Both write JSON with times, power and memory;
`--report FILE.json` makes the table from it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

CASES = ("layer", "model")


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench experts`."""
    parser = argparse.ArgumentParser(prog="meshfold bench experts", description=__doc__.split("\n")[0], add_help=False)
    parser.add_argument("--case", choices=CASES, default="layer")
    parser.add_argument("--wheels", type=Path, nargs="*", default=[])
    parser.add_argument("--report", type=Path)
    known, rest = parser.parse_known_args(argv)
    if known.report:  # the file tells its case
        rest = [*rest, "--report", str(known.report)]
        if "cases" in json.loads(known.report.read_text()):
            known.case = "model"
    with unpacked(known.wheels):
        from benchmarks.experts import layer, model

        return layer.main(rest) if known.case == "layer" else model.main(rest)


def add_wheels(parser: argparse.ArgumentParser) -> None:
    """Name in the help of a case what is read before it: ``--case`` and ``--wheels``."""
    parser.add_argument("--case", choices=CASES, default="layer", help="what is timed")
    parser.add_argument(
        "--wheels", type=Path, nargs="*", help="wheels of peers, which their processes import before what is installed"
    )


@contextmanager
def unpacked(wheels: Sequence[Path]) -> Iterator[None]:
    """Put wheels in front of the path of this process and of those that it starts."""
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        before = os.environ.get("PYTHONPATH")
        if wheels:
            sys.path.insert(0, folder)
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, *([before] if before else [])])
            importlib.invalidate_caches()
        try:
            yield
        finally:
            if wheels:
                sys.path.remove(folder)
                os.environ.pop("PYTHONPATH")
                if before is not None:
                    os.environ["PYTHONPATH"] = before


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
