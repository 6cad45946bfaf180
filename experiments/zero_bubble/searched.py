"""What ``auto`` finds for the times of table 9, a process for every model, two at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

from experiments.zero_bubble.settings import Setting, published_settings
from meshfold.pipeline import search

EFFORT = 0.1  # of the moves behind list scheduling; more finds nothing better here


def searches(models: Collection[str]) -> list[dict[str, Any]]:
    """All settings of some models, searched within the memory of ZB-1p and within that of ZB-2p."""

    def model(name: str) -> list[dict[str, Any]]:
        program = [sys.executable, str(Path(__file__).resolve()), name]
        done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    with ThreadPoolExecutor(2) as pool:
        return [row for rows in pool.map(model, models) for row in rows]


def searched(setting: Setting, share: int) -> dict[str, Any]:
    """One search, within ``share`` times the activations that 1F1B holds."""
    found = search(
        ranks=setting.p,
        microbatches=setting.m,
        chunks=1,
        costs=setting.times.costs(),
        memory=share * setting.p,
        effort=EFFORT,
    )
    return {
        "model": setting.model,
        "p": setting.p,
        "m": setting.m,
        "memory": share,
        "rate": found.simulation.span_bubble,
        "with a barrier": found.simulation.bubble,
        "best named, with a barrier": 1 - setting.work / min(found.named.values()),
        "activations": max(found.simulation.peak) / setting.p,
    }


def main(argv: Sequence[str]) -> int:
    """Search for the models of the command line, and print what was found as JSON."""
    print(json.dumps([searched(*job) for job in product(published_settings(argv), (1, 2))]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
