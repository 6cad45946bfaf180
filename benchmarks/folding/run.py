"""Evoformer blocks beside OpenFold's eager modules, ESMFold's trunk beside transformers'; on one GPU or over several by dap.

`meshfold bench folding` runs 12 blocks of AlphaFold's size in bfloat16, forward and backward, on 128 sequences of 256 residues;
`--sizes 512x384 --recompute blocks` are those of fine-tuning; `--ranks 2` runs over two GPUs, `--ranks 4 --grid 2x2` over a grid of
four. `--case esmfold` runs blocks of ESMFold's trunk at inference on chains of `--lengths`, `--case longest` on the longest chain
that fits into `--gib` of each GPU. Results of one `--out` are compared. JSON has times, power, clock and memory;
`--report FILE.json` makes the table from it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
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
from benchmarks.folding import trunk
from benchmarks.folding.report import report
from benchmarks.folding.worker import CASES

TINY = dict(
    sizes=["6x4"],
    lengths=[12],
    gib=0.002,
    blocks=1,
    narrower=8,
    dtype="float32",
    backend="aot_eager",
    steps=2,
    warm_up=1,
    settle_s=0.0,
    timeout=120.0,
)
BLOCKS = {"evoformer": 12, "esmfold": 2, "longest": 1}
"""Blocks of each case, if not others are asked for."""
WORK = ("case", "ranks", "blocks", "narrower", "dtype")


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench folding`."""
    parser = argparse.ArgumentParser(prog="meshfold bench folding", description=__doc__.split("\n")[0])
    parser.add_argument("--case", choices=CASES, default="evoformer", help="what is timed")
    parser.add_argument(
        "--sizes", nargs="+", default=["128x256"], metavar="SxR", help="sequences x residues of evoformer"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[768, 1536, 4096], help="residues of esmfold")
    parser.add_argument("--gib", type=float, default=24.0, help="memory of a GPU for longest")
    parser.add_argument(
        "--blocks", type=int, help=f"if not {', '.join(f'{n} of {case}' for case, n in BLOCKS.items())}"
    )
    parser.add_argument("--narrower", type=int, default=1, help="divide the model's channels by this")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share a sample by dap")
    parser.add_argument(
        "--grid", metavar="RxC", help="of evoformer: split rows and columns over a grid of the GPUs instead"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--recompute", choices=("blocks", "none"), default="none", help="what backward recomputes")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some contestants; see --list")
    parser.add_argument("--list", action="store_true", help="the contestants of each case")
    add_starts(parser, steps=20, warm_up=3, settle_s=10.0, timeout=180.0)
    add_output(parser, "folding")
    options = parse_with_tiny(parser, argv, TINY)
    if options.grid is not None and options.case != "evoformer":
        parser.error(f"--grid {options.grid}: --case {options.case} is split by dap alone")
    if options.list:
        for case, contestants in CASES.items():
            print("\n".join(f"{case}: {name}" for name in contestants))
        return 0
    if options.report is not None:
        report(options.report)
        return 0
    options.blocks = options.blocks or BLOCKS[options.case]
    names = names_for(options, parser)
    works = list(works_of(options, parser))
    check_out(options.out)
    found = result_to_extend(options.out, "folding", "transformers")
    call = new_call()
    for work in works:
        name = ", ".join(f"{key} {value}" for key, value in work.items() if key != "backend")
        case = found["cases"].setdefault(name, dict(work=work, runs={}))
        for contestant in by_turns(names, options.rounds):
            job = dict(**work, contestant=contestant, **start_settings(options))
            run: dict[str, Any] = run_contestant(Path(__file__).with_name("worker.py"), job, options.timeout, _why)
            case["runs"].setdefault(contestant, []).append({**run, "call": call})
            write(options.out, found)
            said = run["error"] if "error" in run else f"{1e3 * median(run['seconds']):.2f} ms"
            print(f"{heading(work)}, {contestant}: {said}", flush=True)
    report(options.out)
    return 0


def works_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[dict[str, Any]]:
    """Yield what the contestants of a case are given; end with a message for sizes that cannot be."""
    shared = {name: getattr(options, name) for name in WORK}
    if options.case == "evoformer":
        shared |= dict(recompute=options.recompute, backend=options.backend)
        if options.grid is not None:
            shared["grid"] = grid_of(options.grid, options.ranks, parser)
        for text in options.sizes:
            sequences, residues = sizes_of(text, options.ranks, parser)
            yield dict(shared, sequences=sequences, residues=residues)
    elif options.case == "esmfold":
        if min(options.lengths) < options.ranks:
            parser.error(
                f"--lengths {min(options.lengths)}: --ranks {options.ranks} split residues; give longer chains"
            )
        yield from (dict(shared, residues=residues) for residues in options.lengths)
    else:
        sizes = {name: getattr(options, name) for name in ("gib", "ranks", "dtype", "blocks", "narrower")}
        if (residues := trunk.longest(**sizes)) == 0:
            parser.error(f"--gib {options.gib:g}: not even the shortest chain fits; give more")
        yield dict(shared, gib=options.gib, residues=residues)


def heading(work: dict[str, Any]) -> str:
    """Return the sizes of a work in a word or two."""
    if work["case"] == "evoformer":
        return f"{work['sequences']} x {work['residues']}{', grid' * ('grid' in work)}"
    return f"{work['case']}, {work['residues']} residues, {work['ranks']} rank{'s' * (work['ranks'] > 1)}"


def names_for(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Return the contestants that are asked for, or those of the case that can run on this number of ranks.

    Ends with a message for one that the case does not have.
    """
    known = list(CASES[options.case])
    if unknown := [name for name in options.only or () if name not in known]:
        parser.error(f"--only {unknown[0]}: --case {options.case} has {', '.join(known)}")
    return options.only or [name for name in known if options.ranks == 1 or name.startswith("ours")]


def grid_of(text: str, ranks: int, parser: argparse.ArgumentParser) -> list[int]:
    """Return rows and columns of a grid; end with a message unless they are two numbers whose product is the ranks."""
    rows, _, columns = text.partition("x")
    if not (rows.isdigit() and columns.isdigit() and int(rows) * int(columns) == ranks > 1):
        parser.error(
            f"--grid {text}: write rows x columns whose product is --ranks {ranks}, such as --ranks 4 --grid 2x2"
        )
    return [int(rows), int(columns)]


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
