"""What a checkpoint costs the training: written at once, and beside the next steps.

A plain run, one that saves at once and one that saves asynchronously take turns, each a window of steps with a save at its
beginning. `meshfold run --ranks 2 benchmarks/saving.py` measures it on several ranks, `meshfold bench saving` on one. The disk's
speed is part of what is measured, and is printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch

from benchmarks.common import machine, median, synchronize
from meshfold.engine import Engine
from meshfold.engine.models import build

WAYS = ("no save", "at once", "asynchronous")
BAR = 0.05
"""Of a step's time: the most that starting an asynchronous save may take."""


def main(argv: list[str]) -> int:
    """Entry point of `meshfold bench saving`."""
    parser = argparse.ArgumentParser(prog="meshfold bench saving", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt-small")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--window", type=int, default=4, help="steps from one save to the next")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), help="stage (none)")
    parser.add_argument("--folder", type=Path, help="where to save (a temporary folder)")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args(argv)
    parallel = {} if args.zero is None else dict(zero=dict(stage=args.zero))
    engine = Engine(
        lambda: build(args.model), parallel, optimizer=dict(name="adamw", lr=1e-4), precision=args.precision
    )
    rows = torch.randint(256, (args.batch_size, args.seq_len), generator=torch.Generator().manual_seed(0))
    batch = engine.shard_batch(rows)
    shared = args.folder or Path(tempfile.gettempdir()) / "meshfold-bench-saving"
    try:
        result = measure(engine, batch, shared, window=args.window, rounds=args.rounds)
    finally:
        engine.close()
        if engine.mesh.rank == 0:
            shutil.rmtree(shared, ignore_errors=True)
    if engine.mesh.rank == 0:
        print(table(result))
        if args.out is not None:
            settings = {k: v for k, v in vars(args).items() if k not in ("out", "folder")}
            args.out.write_text(json.dumps({"machine": machine(), "settings": settings, **result}, indent=1))
    return 0


def measure(engine: Engine, batch: Any, folder: Path, *, window: int, rounds: int) -> dict[str, Any]:
    """Seconds of windows of each way, in turns, and what this rank's asynchronous saves say of themselves."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    held, whole, nbytes = [], [], 0
    for number in range(rounds + 1):  # the first warms up: memory for the copy is taken once
        for way in WAYS:
            synchronize()
            begin = time.perf_counter()
            save = engine.save(folder / way, asynchronous=way == "asynchronous") if way != "no save" else None
            returned = time.perf_counter() - begin
            for _ in range(window):
                engine.train_step(batch)
            synchronize()
            spent = time.perf_counter() - begin
            if save is not None:
                save.wait()  # so that it does not reach into the next window
            if number:
                seconds[way].append(spent)
                if save is not None:
                    held.append(returned)
                    whole.append(save.seconds)
                    nbytes = save.bytes
    step = median(seconds["no save"]) / window
    return {
        "step_seconds": step,
        "window_seconds": {way: median(found) for way, found in seconds.items()},
        "held_up_seconds": median(held),
        "save_seconds": median(whole),
        "rank_bytes": nbytes,
        "held_up_share": median(held) / step,
    }


def table(result: dict[str, Any]) -> str:
    """The numbers as a person wants them."""
    step, windows = result["step_seconds"], result["window_seconds"]
    speed = result["rank_bytes"] / result["save_seconds"] / 2**20
    verdict = "below" if result["held_up_share"] < BAR else "ABOVE"
    lines = [
        f"a step {step * 1e3:,.0f} ms; a checkpoint {result['rank_bytes'] / 2**20:,.1f} MiB a rank, written at {speed:,.0f} MiB/s",
        f"saved at once:   {(windows['at once'] - windows['no save']) / step:8.1%} of a step",
        f"asynchronously:  {(windows['asynchronous'] - windows['no save']) / step:8.1%} of a step, over the steps beside it",
        f"  held up by it: {result['held_up_share']:8.1%} of a step ({result['held_up_seconds'] * 1e3:,.1f} ms), "
        f"{verdict} {BAR:.0%}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
