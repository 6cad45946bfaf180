"""One rank of ``meshfold reproduce --all --measure N``: every experiment that has a measured.py, in one start of ranks."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from experiments.measuring import Measured
from meshfold.mesh import start

FOLDER = Path(__file__).resolve().parent


def names() -> list[str]:
    """The experiments that can be measured, as they are called on the command line."""
    return sorted(file.parent.name.replace("_", "-") for file in FOLDER.glob("*/measured.py"))


def measured_of(name: str) -> Measured:
    """Return what an experiment measures."""
    found: Measured = importlib.import_module(f"experiments.{name.replace('-', '_')}.measured").MEASURED
    return found


def measure_all(argv: Sequence[str] | None = None) -> int:
    """Measure on this rank, one experiment after the other; rank 0 writes a folder for each, and says what it does.

    Returns:
        0.
    """
    arguments = argparse.ArgumentParser(prog="all_measured.py", description=__doc__)
    arguments.add_argument("--output", type=Path, required=True, help="gets a folder for each experiment")
    arguments.add_argument("--only", nargs="+", default=names(), choices=names(), metavar="NAME", help="these alone")
    options = arguments.parse_args(argv)
    runs = []
    for name in options.only:  # simulated ranks, of which plans are made, cannot be had beside real ones
        one = measured_of(name)
        sizes = one.options(["--output", str(options.output / name)])
        runs.append((name, one, sizes, one.plan(sizes) if one.plan else None))
    with start() as process:
        for name, one, sizes, plan in runs:
            began = time.perf_counter()
            writes = process.rank == 0
            if writes:
                print(f"== {name}", flush=True)
            found = one.take(sizes, process.world_size, torch.device(process.device), plan, writes=writes)
            if writes:
                print(f"{one.page(found).split('-->')[1]}({time.perf_counter() - began:.0f} s)\n", flush=True)
            gc.collect()
            if process.device.type == "cuda":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(measure_all())
