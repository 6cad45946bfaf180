"""One GPU, one large model: where its state lives, and what a step then costs.

OPT-shaped decoders in bfloat16 with activation checkpointing and clipping at 1.0, as in the published comparisons of
offloading. Each row runs in a process of its own, so that its peaks of GPU and host memory are its own. `meshfold bench
zero-placements` times steps after clocks have settled and writes JSON with the raw times, mean power and clock; `--report
FILE.json` makes the table and the plot from it.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch
from torch import nn

from benchmarks import reports
from benchmarks.common import add_output, check_out, host_peak_bytes, machine, median, synchronize, write
from benchmarks.power import PowerLog
from benchmarks.zero_offload.decoder import SHAPES, WORDS, decoder

HEAD = ("state lives", "seconds a step", "GPU peak, GiB", "host peak, GiB")
PLACEMENTS: dict[str, dict[str, Any] | None] = {
    "everything on the GPU, no zero": None,
    "cuda": dict(placement="cuda"),
    "half of the optimizer on the host": dict(placement="static", offload_optim_frac=0.5),
    "optimizer on the host": dict(placement="static", offload_optim_frac=1.0),
    "cpu": dict(placement="cpu"),
    "cpu, regime B": dict(placement="cpu", regime="B"),
    "cpu, regime C": dict(placement="cpu", regime="C"),
}
WORDS_OF = {
    "everything on the GPU, no zero": "on the GPU, no ZeRO",
    "cuda": "on the GPU, ZeRO-3",
    "cpu": "on the host, float32",
    "cpu, regime B": "on the host, bfloat16",
    "cpu, regime C": "on the host, 8 bits",
    "optimizer on the host": "all of it stepped on the host",
    "half of the optimizer on the host": "half of it stepped on the host",
}
"""Labels of the plot's points"""
SIDES = {
    "optimizer on the host": ((9, 5), "left", "center"),
    "half of the optimizer on the host": ((0, 9), "center", "bottom"),
    "cuda": ((0, -9), "center", "top"),
    "cpu": ((9, -8), "left", "center"),
    "cpu, regime C": ((9, 1), "left", "center"),
    "everything on the GPU, no zero": ((8, 9), "right", "bottom"),
}
"""Offset and alignment of the labels that would not stand right of their points"""


def main(argv: list[str]) -> int:
    """Entry point of `meshfold bench zero-placements`."""
    parser = argparse.ArgumentParser(prog="meshfold bench zero-placements", description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="6.7B")
    parser.add_argument("--rows", type=int, default=16, help="sequences of a step")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6, help="timed, after those of the warm-up")
    parser.add_argument("--settle-s", type=float, default=20.0, help="least seconds of warm-up: clocks settle")
    parser.add_argument("--only", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    add_output(parser, "zero_placements")
    parser.add_argument("--row", choices=PLACEMENTS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.report is not None:
        report(options.report)
        return 0
    if options.row is not None:
        print(json.dumps(run(options.row, options)))
        return 0
    check_out(options.out)
    rows = {}
    for name in options.only:
        print(f"{options.model}, {name} ...", flush=True)
        rows[name] = in_a_process(name, argv)
        print(f"  {summary(rows[name])}", flush=True)
    result = {
        "benchmark": "zero-placements",
        "machine": machine(),
        "settings": {
            "model": options.model,
            "rows": options.rows,
            "seq_len": options.seq_len,
            "settle_s": options.settle_s,
            "precision": "bf16",
            "clip_grad_norm": 1.0,
            "activation_checkpointing": "every block",
        },
        "rows": rows,
    }
    write(options.out, result)
    report(options.out)
    return 0


def in_a_process(name: str, argv: list[str]) -> dict[str, Any]:
    """One row's numbers with mean watts and clock, or why it could not run."""
    with PowerLog() as power:
        done = subprocess.run([sys.executable, __file__, *argv, "--row", name], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"]
        return {"error": lines[-1][:500]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**found, **power.mean(found.pop("first"), found.pop("last"), 1)}


def model(shape: str, seq_len: int) -> nn.Module:
    """A decoder of OPT's shape, head and embedding tied."""
    return decoder(*SHAPES[shape], seq_len, tie=True)


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train some steps in this process.

    The first two are no measure of a step; more follow until clocks have settled. Losses and norms are those of the first
    ``steps + 2``, so that rows have as many of them, however long their steps take.
    """
    from meshfold.engine import Engine

    zero = PLACEMENTS[name]
    begin = time.perf_counter()
    engine = Engine(
        partial(model, options.model, options.seq_len),
        {} if zero is None else {"zero": dict(stage=3, **zero)},
        optimizer=dict(name="adamw", lr=1e-4),
        precision="bf16",
        clip_grad_norm=1.0,
    )
    built = time.perf_counter() - begin
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (options.rows, options.seq_len), generator=generator).to(engine.device)
    losses, norms = [], []

    def step() -> float:
        synchronize()
        begin = time.perf_counter()
        losses.append(engine.train_step({"input_ids": ids, "labels": ids}))
        synchronize()
        norms.append(engine.last.grad_norm if engine.last is not None else None)
        return time.perf_counter() - begin

    step()
    for _ in range(math.ceil(options.settle_s / step())):
        step()
    first = time.time()
    seconds = [step() for _ in range(options.steps)]
    last = time.time()
    engine.close()
    return {
        "seconds_to_build": built,
        "seconds": seconds,
        "first": first,
        "last": last,
        "losses": losses[: options.steps + 2],
        "grad_norms": norms[: options.steps + 2],
        "gpu_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        "host_peak_bytes": host_peak_bytes(),
    }


def summary(row: dict[str, Any]) -> str:
    """A row in a line."""
    if "error" in row:
        return str(row["error"])
    gpu, host = row["gpu_peak_bytes"] / 2**30, row["host_peak_bytes"] / 2**30
    return f"{median(row['seconds']):.3f} s a step, GPU {gpu:.1f} GiB, host {host:.1f} GiB"


def report(path: Path) -> None:
    """Table and plot from a result."""
    result = json.loads(path.read_text())
    about, rows = result["settings"], result["rows"]
    sampled = any("watts" in row for row in rows.values())
    steps = max((len(row["losses"]) for row in rows.values() if "error" not in row), default=0)
    head = (*HEAD, *(reports.JOULES if sampled else ()), f"loss of step {steps}")
    tokens = about["rows"] * about["seq_len"] if sampled else 0
    lines = [
        f"{about['model']}, {about['rows']} × {about['seq_len']} tokens a step; {result['machine'].get('gpu', 'CPU')}, torch "
        f"{result['machine']['torch']}; bfloat16, every block recomputed, clipped at 1.0. Median of the timed steps, lowest and "
        "highest in brackets.",
        "",
        *reports.table(head, (_row(name, row, tokens, len(head)) for name, row in rows.items())),
    ]
    reports.save(drawn(about, {name: row for name, row in rows.items() if "error" not in row}), lines, path)


def _row(name: str, row: dict[str, Any], tokens: int, cells: int) -> list[str]:
    """Return a row of so many cells; ``tokens`` of a step, 0 where no power was sampled."""
    if "error" in row:
        return [name, *["–"] * (cells - 2), row["error"]]
    times = row["seconds"]
    return [
        name,
        reports.spread((median(times), min(times), max(times)), 3),
        f"{row['gpu_peak_bytes'] / 2**30:.1f}",
        f"{row['host_peak_bytes'] / 2**30:.1f}",
        *(reports.joules(reports.mean_power([row]), median(times), tokens) if tokens else ()),
        f"{row['losses'][-1]:.3f}",
    ]


def drawn(about: dict[str, Any], rows: dict[str, dict[str, Any]]) -> Any:
    """Seconds a step against GPU memory: each row a point."""
    figure, panels = reports.panels(1, 1, 4.4)
    panel = panels[0][0]
    for name, row in rows.items():
        point = row["gpu_peak_bytes"] / 2**30, median(row["seconds"])
        panel.plot(*point, "o", markersize=9, color=reports.OURS)
        shift, across, down = SIDES.get(name, ((9, 0), "left", "center"))
        panel.annotate(WORDS_OF.get(name, name), point, xytext=shift, textcoords="offset points", ha=across, va=down)
    panel.set(
        xlabel="peak of GPU memory, GiB",
        ylabel="time of a step, s",
        title=f"{about['model']}, {about['rows']} × {about['seq_len']} tokens\nplace of the optimizer state",
    )
    panel.margins(0.1)  # so that no point is cut off at the edge
    panel.set_ylim(bottom=0, top=3.4)
    panel.set_xlim(left=0, right=130)
    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
