"""What a checkpoint costs the training: written at once, and beside the next steps.

A plain run, one that saves at once and one that saves asynchronously take turns, each a window of steps with a save at its
beginning. `meshfold run --ranks 2 benchmarks/saving.py` measures it on several ranks, `meshfold bench saving` on one. The disk's
speed is part of what is measured, and is printed.

The bar: an asynchronous save costs the step it falls in less than 5 %. What it costs is how much longer its window took than one
without a save: all of it, the time in which ``save`` holds the training up, what the copies take of its memory and bus, and what
the optimizer waits for them. The copies have one forward and backward to run beside; only then may the optimizer change what is
copied. So the bar can be met where the copies take less time than that, whatever the model: bytes kept by the rank over the speed
of the bus, against the step. Where they take longer (few tokens a step, or a slow bus) the optimizer waits for the rest, in that
one step; then the table says so, and the bar holds for the save's cost spread over the steps from one save to the next. Not to
wait would take a second copy of the state on the device, which is memory that training would rather have.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch

from benchmarks.common import machine, median, synchronize
from benchmarks.power import PowerLog
from benchmarks.reports import joules, mean_power, read_bars
from meshfold.engine import Engine
from meshfold.models import build

WAYS = ("no save", "at once", "asynchronous")
BAR = read_bars("saving", ("step_share",))["step_share"]


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
    parser.add_argument("--placement", default="cuda", help="of the state under --zero: cuda, cpu, auto")
    parser.add_argument(
        "--clip", type=float, default=1.0, help="norm; 0: none, and chunks of --zero are stepped in backward"
    )
    parser.add_argument("--folder", type=Path, help="where to save (a temporary folder)")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args(argv)
    parallel = {} if args.zero is None else dict(zero=dict(stage=args.zero, placement=args.placement))
    engine = Engine(
        lambda: build(args.model),
        parallel,
        optimizer=dict(name="adamw", lr=1e-4),
        precision=args.precision,
        clip_grad_norm=args.clip or None,
    )
    rows = torch.randint(256, (args.batch_size, args.seq_len), generator=torch.Generator().manual_seed(0))
    batch = engine.shard_batch(rows)
    shared = args.folder or Path(tempfile.gettempdir()) / "meshfold-bench-saving"
    try:
        with PowerLog() if engine.mesh.rank == 0 else nullcontext() as log:
            result, spans = measure(engine, batch, shared, window=args.window, rounds=args.rounds)
        if log is not None:
            gpus = engine.mesh.world_size
            result["power"] = {way: mean_power(log.mean(*span, gpus) for span in spans[way]) for way in WAYS}
            result["tokens"] = rows.numel() * args.window
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


def measure(
    engine: Engine, batch: Any, folder: Path, *, window: int, rounds: int
) -> tuple[dict[str, Any], dict[str, list[tuple[float, float]]]]:
    """Seconds of windows of each way, in turns, and what this rank's asynchronous saves say of themselves; when windows were."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    first: dict[str, list[float]] = {way: [] for way in WAYS}
    spans: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    held, copied, whole, nbytes = [], [], [], 0
    for number in range(rounds + 1):  # the first warms up: memory for the copy is taken once
        for way in WAYS:
            engine.train_step(batch)  # each begins as within a run: on a device that was busy just before
            synchronize()
            begin, since = time.perf_counter(), time.time()
            save = engine.save(folder / way, asynchronous=way == "asynchronous") if way != "no save" else None
            returned = time.perf_counter() - begin
            for place in range(window):
                engine.train_step(batch)  # which waits for the device, to tell the loss
                if place == 0:
                    one = time.perf_counter() - begin - returned
            synchronize()
            spent = time.perf_counter() - begin
            if save is not None:
                save.wait()  # so that it does not reach into the next window
            if number:
                seconds[way].append(spent)
                spans[way].append((since, since + spent))
                first[way].append(one)
                if save is not None:
                    held.append(returned)
                    copied.append(save.copied_seconds)
                    whole.append(save.seconds)
                    nbytes = save.bytes
    step = median(seconds["no save"]) / window
    windows = {way: median(found) for way, found in seconds.items()}
    cost = {way: windows[way] - windows["no save"] for way in WAYS[1:]}
    result = {
        "window": window,
        "step_seconds": step,
        "window_seconds": windows,
        "held_up_seconds": median(held),
        "copied_seconds": median(copied),
        "save_seconds": median(whole),
        "rank_bytes": nbytes,
        "cost_seconds": cost,
        "first_step_cost_seconds": median(first["asynchronous"]) - median(first["no save"]),
        "share_of_its_step": {way: value / step for way, value in cost.items()},
        "share_of_its_window": {way: value / windows["no save"] for way, value in cost.items()},
    }
    return result, spans


def table(result: dict[str, Any]) -> str:
    """The numbers as a person wants them."""
    step, window = result["step_seconds"], result["window"]
    speed = result["rank_bytes"] / result["save_seconds"] / 2**20
    lines = [
        f"a step {step * 1e3:,.0f} ms; a checkpoint {result['rank_bytes'] / 2**20:,.1f} MiB a rank, "
        f"written at {speed:,.0f} MiB/s; a save every {window} steps",
        f"{'a save':16}{'ms':>10}{'of its step':>14}{f'of {window} steps':>16}",
    ]
    for way in WAYS[1:]:
        cost, one, all_ = (result[key][way] for key in ("cost_seconds", "share_of_its_step", "share_of_its_window"))
        lines.append(f"{way:16}{cost * 1e3:10,.1f}{one:14.1%}{all_:16.2%}")
    lines.append(
        f"asynchronously: save() returned after {result['held_up_seconds'] * 1e3:,.1f} ms, all was copied after "
        f"{result['copied_seconds'] * 1e3:,.1f} ms"
    )
    for way, power in result.get("power", {}).items():
        if power:
            spent, token, watts, clock = joules(power, result["window_seconds"][way], result["tokens"])
            what = f"{window} steps" if way == WAYS[0] else f"{window} steps and a save"
            lines.append(f"{way}: {spent} J in {what}, {token} J a token, {watts} W, {clock} MHz")
    save, one = result["held_up_seconds"], result["first_step_cost_seconds"]
    rest = result["cost_seconds"]["asynchronous"] - save - one
    lines.append(
        f"of what it costs save() is {save * 1e3:,.1f} ms, the step it falls in {one * 1e3:,.1f} ms, "
        f"the {window - 1} after it {rest * 1e3:,.1f} ms"
    )
    one, all_ = (result[key]["asynchronous"] for key in ("share_of_its_step", "share_of_its_window"))
    if BAR.met(one):
        lines.append(f"below {BAR.most:.0%} of {BAR.what}")
    elif result["copied_seconds"] < step:
        lines.append(f"ABOVE {BAR.most:.0%} of {BAR.what}, in which it was copied")
    else:
        verdict = "below" if BAR.met(all_) else "ABOVE"
        lines.append(f"the copies take longer than a step: spread over {window} steps it is {verdict} {BAR.most:.0%}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
