"""Models larger than the GPU, side by side: ours, DeepSpeed, FSDP2, Colossal-AI's Gemini and plain torch.

Every contestant trains the same decoder in a process of its own, on the same cores, under the same limits of GPU and
host memory. `meshfold bench zero-offload --case 6.7B-40` writes JSON with the seconds of every step, norms, clip
factors, losses and peaks; runs are added to that file. `--report FILE.json` makes the table and the plot from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks.common import add_output, check_out, machine, new_call, write
from benchmarks.zero_offload import process, verdict
from benchmarks.zero_offload.cases import CASES, CONTESTANTS, OURS, Case, chosen
from benchmarks.zero_offload.decoder import shape_of
from benchmarks.zero_offload.job import GIB, Job
from benchmarks.zero_offload.report import line, report

LIBRARIES = ("deepspeed", "colossalai", "transformers", "triton", "numba", "numpy")


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench zero-offload`."""
    options = _arguments().parse_args(argv)
    if options.report is not None:
        report(options.report)
        return 0
    if options.list:
        for case in CASES.values():
            batch = "rows found by search" if case.search else f"{case.rows} × {case.seq_len} tokens a step"
            print(f"{case.name:<22} {case.about}; {batch}: {', '.join(case.contestants)}")
            for bar in verdict.bars_of(case):
                print(f"{'':<22} - {verdict.described(bar)}")
        return 0
    if options.prepare:
        return prepare()
    if options.merge:
        merge(options.merge, options.out, replace=options.replace)
        report(options.out)
        return 0
    if options.touch:
        touch(options.touch)
        if not options.case:
            return 0
    check_out(options.out)
    if options.layers is None:
        check_gpus(chosen(options.case))
    result, call = _opened(options.out), new_call()
    for case in chosen(options.case):
        _run(_changed(case, options), options, result, call)
        _write(options.out, result)
    report(options.out)
    return 0


def check_gpus(cases: Sequence[Case]) -> None:
    """Refuse models that a machine without enough GPUs would train on its CPU, for hours and in all of its memory.

    Raises:
        Failure: for a case that needs GPUs which are not there.
    """
    import torch

    from meshfold.cli.arguments import Failure

    there = torch.cuda.device_count()
    for case in cases:
        if case.ranks > there and not case.name.startswith("tiny"):
            needed = "a GPU" if case.ranks == 1 else f"{case.ranks} GPUs"
            found = {0: "none", 1: "one"}.get(there, str(there))
            raise Failure(
                f"--case {case.name} needs {needed}, and torch sees {found} here: --case tiny shows the command at work on a CPU"
            )


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshfold bench zero-offload", description=__doc__.split("\n")[0])
    parser.add_argument("--case", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--only", nargs="+", metavar="CONTESTANT", help=f"of {', '.join(CONTESTANTS)}")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each contestant: A B A B")
    parser.add_argument("--clip", type=float, help="largest norm, for every case; 1e9: never reached; 0: no clipping")
    parser.add_argument("--lr", type=float, help="for every case")
    parser.add_argument("--rows", type=int, help="for every case")
    parser.add_argument("--layers", type=int, help="of the decoder, for every case: to place a size exactly")
    parser.add_argument("--warm-up", type=int, help="steps that are not timed")
    parser.add_argument("--steps", type=int, help="steps that are")
    parser.add_argument("--gpu-limit", type=float, help="GiB, for every case")
    parser.add_argument("--host-limit", type=float, help="GiB, for every case")
    parser.add_argument("--cores", type=int, default=16, help="of each rank")
    parser.add_argument("--disk", type=Path, help="folder for what goes to disk (default: a temporary one)")
    parser.add_argument(
        "--flags",
        type=json.loads,
        default={},
        metavar="JSON",
        help='settings of libraries by contestant: {"FSDP2": {"reduce_dtype": "bfloat16"}}',
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one start of a contestant")
    parser.add_argument(
        "--touch",
        type=float,
        default=0.0,
        help="GiB of host memory to fill once before, where a virtual machine grows as it is used",
    )
    parser.add_argument("--prepare", action="store_true", help="compile the peers' extensions, and nothing else")
    add_output(parser, "zero_offload")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="add the runs of these results to --out")
    parser.add_argument(
        "--replace", action="store_true", help="with --merge: in place of these contestants' runs of a case"
    )
    parser.add_argument("--list", action="store_true", help="the cases")
    return parser


def _opened(path: Path) -> dict[str, Any]:
    """The result to add to: an earlier one of the same kind of machine, or a new one."""
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {"benchmark": "zero-offload", "cases": {}}


def merge(paths: Sequence[Path], out: Path, *, replace: bool = False) -> None:
    """Add what was measured elsewhere, its settings from the last.

    Args:
        paths: results.
        out: the result to add to.
        replace: these runs take the place of what is there of their contestants (measured with older code, say) in their
            cases; otherwise they come behind.
    """
    result = _opened(out)
    for path in paths:
        for name, case in json.loads(path.read_text())["cases"].items():
            kept = result["cases"].setdefault(name, {"rows": {}})
            kept["settings"] = case["settings"]
            for contestant, runs in case["rows"].items():
                if replace:
                    kept["rows"].pop(contestant, None)
                kept["rows"].setdefault(contestant, []).extend(runs)
    _write(out, result)


def _write(out: Path, result: dict[str, Any]) -> None:
    """Cases in the order in which they are listed, whenever each was run."""
    cases, listed = result["cases"], list(CASES)
    result["cases"] = {name: cases[name] for name in sorted(cases, key=lambda name: listed.index(name))}
    write(out, result)


def _changed(case: Case, options: argparse.Namespace) -> Case:
    names = {"lr": "lr", "rows": "rows", "warm_up": "warm_up", "steps": "steps"}
    names |= {"gpu_gib": "gpu_limit", "host_gib": "host_limit"}
    changes = {field: getattr(options, name) for field, name in names.items()}
    if options.clip is not None:
        case = dataclasses.replace(case, clip=options.clip or None)
    if options.only:
        changes["contestants"] = tuple(options.only)
    return dataclasses.replace(case, **{name: value for name, value in changes.items() if value is not None})


def _run(case: Case, options: argparse.Namespace, result: dict[str, Any], call: str) -> None:
    kept = result["cases"].setdefault(case.name, {"rows": {}})
    kept["settings"] = {
        **dataclasses.asdict(case),
        "bars": [dataclasses.asdict(bar) for bar in verdict.bars_of(case)],
        "layers": options.layers or shape_of(case.model)[0],
    }
    for number in range(options.rounds):
        for name in case.contestants:
            print(f"{case.name}, {name}, round {number + 1} ...", flush=True)
            begin = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="offload-disk-") as folder:
                job = _job(case, name, options, str(options.disk or folder))
                found = process.run(job, options.timeout)
            found["asked"] = {**dataclasses.asdict(job), "disk": bool(job.disk)}
            took = time.monotonic() - begin
            found |= {"call": call, "wall_seconds": took, "machine": {**machine(), **_versions()}}
            kept["rows"].setdefault(name, []).append(found)
            print(f"  {line(found, case.ranks)}, {found['wall_seconds']:.0f} s in all", flush=True)
            _write(options.out, result)


def _job(case: Case, name: str, options: argparse.Namespace, disk: str) -> Job:
    if name not in CONTESTANTS:
        raise SystemExit(f"there is no contestant {name!r}; there are: {', '.join(CONTESTANTS)}")
    module, told = CONTESTANTS[name]
    layers, hidden, heads = shape_of(case.model)
    # Ours first watches two steps, and looks at four under its plan; the next follows a step where chunks may have lain elsewhere.
    warm_up = max(case.warm_up, 7) if name == OURS and case.warm_up else case.warm_up
    return Job(
        contestant=name,
        module=module,
        options=told,
        layers=options.layers or layers,
        hidden=hidden,
        heads=heads,
        rows=case.rows,
        seq_len=case.seq_len,
        palm=case.model if case.model.startswith("palm") else "",
        gpu_limit=int(case.gpu_gib * GIB),
        host_limit=int(case.host_gib * GIB),
        clip=case.clip,
        lr=case.lr,
        regime=case.regime,
        disk=disk if case.disk else None,
        warm_up=warm_up,
        steps=case.steps,
        cores=options.cores,
        ranks=case.ranks,
        flags=options.flags.get(name, {}),
        search=case.search,
    )


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[library] = None
    return found


def touch(gib: float) -> None:
    """Fill host memory once with all threads, in a process that then ends."""
    begin = time.monotonic()
    size = int(gib * GIB)
    subprocess.run(
        [sys.executable, "-c", f"import torch; torch.empty({size}, dtype=torch.uint8).fill_(1)"], check=False
    )
    print(f"filled {gib:g} GiB once in {time.monotonic() - begin:.0f} s", flush=True)


def prepare() -> int:
    """Let the peers compile their extensions, side by side, so that no contestant's start waits for it."""
    running = {
        peer: subprocess.Popen(
            [sys.executable, "-c", f"import benchmarks.peers.{peer} as peer; peer.prepare()"],
            cwd=Path(__file__).resolve().parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for peer in ("deepspeed_offload", "colossalai_gemini")
    }
    begin = time.monotonic()
    for peer, one in running.items():
        said = one.communicate()[0].strip().splitlines() or ["nothing"]
        ready = "ready" if one.returncode == 0 else f"not ready: {said[-1][:300]}"
        print(f"{peer}: {ready} after {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
