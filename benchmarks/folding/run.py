"""Blocks of the Evoformer on one GPU, or over several by dap: ours beside OpenFold's eager modules and torch.compile.

`meshfold bench folding` runs 12 blocks of AlphaFold's size in bfloat16, forward and backward, on 128 sequences of 256 residues;
`--sizes 512x384 --recompute blocks` are those of fine-tuning; `--ranks 2` runs over two GPUs. Results of one `--out` are compared.
It writes JSON with times, power, clock and memory; `--report FILE.json` makes the table from it.
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
from benchmarks.folding.report import report
from benchmarks.folding.worker import CONTESTANTS

TINY = dict(
    sizes=["6x4"],
    blocks=1,
    narrower=8,
    dtype="float32",
    backend="aot_eager",
    steps=2,
    warm_up=1,
    settle_s=0.0,
    timeout=120.0,
)
WORK = ("ranks", "blocks", "narrower", "dtype", "recompute", "backend")


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench folding`."""
    parser = argparse.ArgumentParser(prog="meshfold bench folding", description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["128x256"], metavar="SxR", help="sequences x residues")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--narrower", type=int, default=1, help="divide AlphaFold's channels by this")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share a sample by dap")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--recompute", choices=("blocks", "none"), default="none", help="what backward recomputes")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, metavar="NAME", help="some contestants; see --list")
    parser.add_argument("--list", action="store_true", help="the contestants")
    add_starts(parser, steps=20, warm_up=3, settle_s=10.0, timeout=180.0)
    add_output(parser, "folding")
    options = parse_with_tiny(parser, argv, TINY)
    if options.list:
        print("\n".join(CONTESTANTS))
        return 0
    if options.report is not None:
        report(options.report)
        return 0
    check_out(options.out)
    sizes = [sizes_of(text, options.ranks, parser) for text in options.sizes]
    found = result_to_extend(options.out, "folding", "transformers")
    call = new_call()
    for sequences, residues in sizes:
        work = dict({name: getattr(options, name) for name in WORK}, sequences=sequences, residues=residues)
        name = ", ".join(f"{key} {value}" for key, value in work.items() if key != "backend")
        case = found["cases"].setdefault(name, dict(work=work, runs={}))
        for contestant in by_turns(options.only or names_for(options.ranks), options.rounds):
            job = dict(**work, contestant=contestant, **start_settings(options))
            run: dict[str, Any] = run_contestant(Path(__file__).with_name("worker.py"), job, options.timeout, _why)
            case["runs"].setdefault(contestant, []).append({**run, "call": call})
            write(options.out, found)
            said = run["error"] if "error" in run else f"{1e3 * median(run['seconds']):.2f} ms"
            print(f"{sequences} x {residues}, {contestant}: {said}", flush=True)
    report(options.out)
    return 0


def names_for(ranks: int) -> list[str]:
    """Return the contestants that can run on this number of ranks."""
    return [name for name in CONTESTANTS if ranks == 1 or name.startswith("ours")]


def sizes_of(text: str, ranks: int, parser: argparse.ArgumentParser) -> tuple[int, int]:
    """Return sequences and residues; end with a message unless they are two numbers that the ranks divide."""
    sequences, _, residues = text.partition("x")
    if not (sequences.isdigit() and residues.isdigit() and int(sequences) and int(residues)):
        parser.error(f"--sizes {text}: write sequences x residues, such as 128x256")
    if int(sequences) % ranks or int(residues) % ranks:
        parser.error(f"--sizes {text}: --ranks {ranks} must divide both numbers")
    return int(sequences), int(residues)


def _why(said: str) -> str:
    """Return the last line that names an error."""
    lines = [line.strip() for line in said.splitlines() if "Error: " in line and not line.startswith(" ")]
    return lines[-1][:200] if lines else ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
