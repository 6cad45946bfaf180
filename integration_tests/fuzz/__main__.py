"""``python -m integration_tests.fuzz``: hunt, replay, shrink."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from integration_tests.fuzz.cases import Case, random_case
from integration_tests.fuzz.hunt import RESULTS, Hunt, hunt, told
from integration_tests.fuzz.judge import judge
from integration_tests.fuzz.shrink import shrink


def main(argv: list[str]) -> int:
    """Exit code 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to hunt")
    parser.add_argument("--cases", type=int, help="how many cases to judge at most")
    parser.add_argument("--seed", type=int, help="the first case's; by default the clock's")
    parser.add_argument("--processes", type=int, default=1, help="how many hunt side by side")
    parser.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs="?", const=str(RESULTS), metavar="FILE", help="keep the counts as JSON")
    parser.add_argument("--replay", metavar="CASE", help="one case, as a finding prints it, or its seed")
    parser.add_argument("--shrink", action="store_true", help="make the replayed case smaller")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    if asked.replay is not None:
        return replay(asked.replay, smaller=asked.shrink)
    seed = int(time.time()) * 1000 if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    found = side_by_side(seed, asked) if asked.processes > 1 else alone(seed, asked)
    print(found)
    if asked.write:
        found.write(Path(asked.write))
    return 1 if found.findings else 0


def alone(seed: int, asked: argparse.Namespace) -> Hunt:
    """Hunt in this process."""
    found = Hunt()
    for case, verdict in hunt(seed, found, seconds=asked.seconds, cases=asked.cases, stride=asked.stride):
        if verdict.kind == "finding":
            print(told(case, verdict), flush=True)
        if asked.write and found.cases % 100 == 0:
            found.write(Path(asked.write))
    return found


def side_by_side(seed: int, asked: argparse.Namespace) -> Hunt:
    """Hunt in several processes, each with every n-th seed, and add up what they count."""
    found, count = Hunt(), asked.processes
    with tempfile.TemporaryDirectory(prefix="meshfold-fuzz-") as folder:
        parts = [Path(folder) / f"{number}.json" for number in range(count)]
        hunters = []
        for number, part in enumerate(parts):
            command = [sys.executable, "-m", "integration_tests.fuzz", f"--seed={seed + number}"]
            command += [f"--stride={count}", f"--seconds={asked.seconds}", f"--write={part}"]
            if asked.cases is not None:
                command += [f"--cases={asked.cases // count + (number < asked.cases % count)}"]
            hunters.append(subprocess.Popen(command))
        for hunter, part in zip(hunters, parts, strict=True):
            hunter.wait()
            if not part.exists():
                raise SystemExit(f"the process with seed {seed + parts.index(part)} ended with {hunter.returncode}")
            found.merge(json.loads(part.read_text()))
    return found


def replay(text: str, *, smaller: bool) -> int:
    """Judge one case again."""
    case = random_case(int(text)) if text.isdigit() else Case.from_json(text)
    verdict = judge(case)
    if smaller and verdict.kind == "finding":
        case, verdict = shrink(case, verdict)
    print(verdict.kind, verdict.why, verdict.detail, case.to_json(), sep="\n")
    return 1 if verdict.kind == "finding" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
