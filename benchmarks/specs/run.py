"""A Llama-8B-shaped model trained under several specs, beside FSDP2 compiled: loss curves, tokens a second, MFU.

Every contestant starts from the same weights and sees the same batches, in a group of processes of its own, one after the
other, `--rounds` times; the first start of each gives its loss curve, all of them give times. No activation is recomputed.
`meshfold bench specs --ranks 4` writes JSON with all losses and times, to which runs are added; `--report FILE.json` makes
table, bars and plot from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks.common import (
    add_output,
    check_out,
    how_it_ended,
    machine,
    median,
    new_call,
    parse_with_tiny,
    start_ranks,
    write,
)
from benchmarks.power import PowerLog
from benchmarks.specs.contestants import SPECS, names
from benchmarks.specs.report import described, report

TINY = dict(model="llama-tiny", seq_len=32, lr=1e-3, rise=2, precision="fp32", steps=6, warm_up=2)
NOT_SETTINGS = ("out", "report", "list", "only", "rounds", "timeout", "rank_job", "tiny")


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench specs`."""
    args = _arguments(argv)
    if args.report:
        return report(args.report)
    if args.list:
        print("\n".join(names(args.ranks)))
        return 0
    if args.rank_job:
        from benchmarks.specs.worker import run

        return run(args, json.loads(args.rank_job))
    chosen = args.only or names(args.ranks)
    if unknown := [name for name in chosen if name not in names(args.ranks)]:
        raise SystemExit(f"there is no contestant {unknown[0]!r}; there are: {', '.join(names(args.ranks))}")
    check_out(args.out)
    result, call = _opened(args), new_call()
    for _ in range(args.rounds):
        for name in chosen:
            known = result["contestants"].get(name, [])
            runs = result["contestants"][name] = [run for run in known if "error" not in run]
            # The first start gives the curve, later ones only times.
            steps = args.warm_up + args.later_steps if runs else args.steps
            begin = time.monotonic()
            runs.append({**_run(args, list(argv), name, steps), "call": call})
            print(f"{name:<32} {_summary(args, runs[-1])}; {time.monotonic() - begin:.0f} s", flush=True)
            write(args.out, result)
    print(described(result))
    print(f"written to {args.out}")
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="meshfold bench specs", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, choices=sorted(SPECS), help="local ranks, one a GPU")
    parser.add_argument("--model", default="llama-8b", help="a preset of our Llama")
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step's whole batch")
    parser.add_argument("--micro-steps", type=int, default=1, help="parts of a step's batch, one after the other")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=50, help="of the first start: the loss curve")
    parser.add_argument("--warm-up", type=int, default=5, help="steps of each start that are not timed")
    parser.add_argument("--later-steps", type=int, default=10, help="timed steps of later starts")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each contestant: A B A B")
    parser.add_argument("--lr", type=float, default=1e-5, help="of AdamW, once it has risen")
    parser.add_argument("--rise", type=int, default=10, help="steps in which the learning rate rises from zero")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--only", nargs="+", metavar="CONTESTANT", help="see --list")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one start")
    parser.add_argument("--list", action="store_true", help="the contestants")
    add_output(parser, "specs")
    parser.add_argument("--rank-job", default="", help=argparse.SUPPRESS)
    args = parse_with_tiny(parser, argv, TINY)
    if not args.model.startswith("llama"):
        raise SystemExit(f"--model {args.model}: a Llama, as in llama-8b")
    if args.rise < 1:
        raise SystemExit(f"--rise {args.rise}: steps in which the learning rate rises, at least 1")
    if (
        args.seq_len % 2
        or args.micro_steps < 1
        or args.rows % (args.ranks * args.micro_steps)
        or not 0 < args.warm_up < args.steps
    ):
        raise SystemExit(
            f"--seq-len {args.seq_len} must be even, --rows {args.rows} a multiple of --ranks {args.ranks} times --micro-steps "
            f"{args.micro_steps}, and --steps {args.steps} more than --warm-up {args.warm_up}, which must be at least 1"
        )
    return args


def _opened(args: argparse.Namespace) -> dict[str, Any]:
    """The result to add to: what is there if it was measured with the same settings, else a new one."""
    settings = {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}
    if args.micro_steps == 1:  # as in results that are older than it
        del settings["micro_steps"]
    fresh = {"area": "specs", "machine": machine(), "settings": settings, "contestants": {}}
    if not args.out.exists():
        return fresh
    known: dict[str, Any] = json.loads(args.out.read_text())
    if known["settings"] != settings or known["machine"] != fresh["machine"]:
        raise SystemExit(f"{args.out} has other settings or is of another machine: give another --out")
    return known


def _run(args: argparse.Namespace, argv: list[str], name: str, steps: int) -> dict[str, Any]:
    """One start of a contestant: what its rank 0 noted, and why it ended if it failed."""
    with tempfile.TemporaryDirectory(prefix="specs-") as folder, PowerLog() as power:
        out = Path(folder) / "found.json"
        job = {"contestant": name, "steps": steps, "out": str(out)}
        words = [*argv, "--rank-job", json.dumps(job)]
        ended, said = start_ranks(Path(__file__), words, args.ranks, args.timeout)
        found: dict[str, Any] = {"losses": [], "seconds": [], "peak_bytes": 0}
        if out.exists():
            found = json.loads(out.read_text())
    ends = found.pop("ends", [])
    if len(ends) > args.warm_up:
        found.update(power.mean(ends[args.warm_up - 1], ends[-1], args.ranks))
    if ended != 0:
        print(said[-3000:], file=sys.stderr, flush=True)
        found["error"] = how_it_ended(ended, said, args.timeout)
    return found


def _summary(args: argparse.Namespace, run: dict[str, Any]) -> str:
    timed = run["seconds"][args.warm_up :]
    if not timed:
        return str(run.get("error", "no timed step"))
    tokens = args.rows * args.seq_len / args.ranks / median(timed)
    return (
        f"{median(timed):.3f} s a step, {tokens:,.0f} tokens/s a rank, {run['peak_bytes'] / 2**30:.1f} GiB, loss "
        f"{run['losses'][0]:.3f} → {run['losses'][-1]:.3f}"
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
