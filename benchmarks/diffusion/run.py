"""Denoisers of diffusers in training: Stable Diffusion 2's U-Net alone, DiT-XL/2 and a Flux of 12 billion parameters on two GPUs.

`meshfold bench diffusion --case sd2` times one case; each contestant runs in processes of its own. `sd2-11` and `sd2-5.6` may take
that many GiB of a GPU, state in host memory. Models are made from configurations, with random weights. JSON has times, watts,
clocks and peak memory; `--report FILE.json` makes the table from it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks.common import (
    add_output,
    add_starts,
    by_turns,
    check_out,
    median,
    new_call,
    parse_with_tiny,
    result_to_extend,
    run_contestant,
    start_settings,
    write,
)
from benchmarks.diffusion.cases import CASES, Case, tiny
from benchmarks.diffusion.report import report
from benchmarks.diffusion.worker import CONTESTANTS

TINY = dict(dtype="float32", backend="aot_eager", steps=2, settle_s=0.0, warm_up=1, timeout=120.0)


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench diffusion`."""
    parser = argparse.ArgumentParser(prog="meshfold bench diffusion", description=__doc__.split("\n")[0])
    parser.add_argument("--case", choices=CASES, nargs="+", default=["sd2"], help="what is trained")
    parser.add_argument("--rows", type=int, help="images a step over all ranks, if not the case's")
    parser.add_argument("--limit", type=float, help="GiB of GPU memory for a rank, if not the case's")
    parser.add_argument("--recompute", choices=("blocks", "auto", "none"), help="in backward, if not the case's")
    parser.add_argument("--micro-steps", type=int, help="of a step of ours, if not the case's")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, metavar="NAME", help="contestants, if not the case's")
    add_starts(parser, steps=20, warm_up=4, settle_s=20.0, timeout=200.0)
    parser.add_argument(
        "--compile-s",
        type=float,
        default=600.0,
        help="more seconds for a start that compiles; the table says who did not compile in time",
    )
    parser.add_argument("--list", action="store_true", help="the cases with their contestants")
    add_output(parser, "diffusion")
    options = parse_with_tiny(parser, argv, TINY)
    if options.list:
        for name, case in CASES.items():
            print(f"{name}: {case.about}; {case.ranks} GPUs, {case.rows} images; {'; '.join(case.contestants)}")
        return 0
    if options.report is not None:
        print(report(options.report))
        return 0
    check_out(options.out)
    found = result_to_extend(options.out, "diffusion", "diffusers")
    for name in options.case:
        time_case(name, options, found)
    print(report(options.out))
    return 0


def time_case(name: str, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Run the contestants of a case by turns, and add what they found to the result."""
    case = tiny(CASES[name]) if options.tiny else CASES[name]
    work = work_of(case, options)
    if work["rows"] % (work["ranks"] * work["micro_steps"]):
        raise SystemExit(
            f"--rows {work['rows']}: {work['ranks']} GPUs with {work['micro_steps']} micro-steps do not divide them"
        )
    entry = found["cases"].setdefault(name, dict(about=case.about, work=work, runs={}))
    if entry["work"] != work:
        raise SystemExit(f"{options.out} has the case {name} with other settings: give another --out")
    call = new_call()
    for who in by_turns(options.only or case.contestants, options.rounds):
        job = dict(**work, contestant=who, **start_settings(options))
        compiles = "compiled" in who
        timeout = options.timeout + (options.compile_s if compiles else 0.0)
        run = run_contestant(Path(__file__).with_name("worker.py"), job, timeout, _why)
        if compiles and "first_step_s" not in run and run.get("error", "").startswith("stopped"):
            run["error"] = f"did not compile in {timeout:g} s"
        entry["runs"].setdefault(who, []).append({**run, "call": call})
        write(options.out, found)
        report(options.out)  # what is known stays if a later contestant is broken off
        print(f"{name}, {who}: {run['error'] if 'error' in run else format(median(run['seconds']), '.4f')}", flush=True)


def work_of(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Return what every contestant of a case is given, as JSON has it."""
    return dict(
        kind=case.kind,
        config={key: list(value) if isinstance(value, tuple) else value for key, value in case.config.items()},
        rows=options.rows or case.rows,
        tokens=list(case.tokens),
        ranks=case.ranks,
        limit=case.limit if options.limit is None else options.limit,
        recompute=options.recompute or case.recompute,
        micro_steps=options.micro_steps or case.micro_steps,
        dtype=options.dtype,
        backend=options.backend,
    )


def _why(said: str) -> str:
    """Return the last line that names an error, so that a launcher's own last words do not hide it."""
    lines = [line.strip() for line in said.splitlines() if "Error: " in line and not line.startswith(" ")]
    return lines[-1][:200] if lines else ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
