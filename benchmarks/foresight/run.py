"""Plans beside what was measured: memory and time of a step of at least 40 configurations, by turns, on the ranks at hand.

`meshfold bench foresight` calibrates the machine (or takes `--machine FILE`), plans the configurations that its devices can
hold, trains each for some steps, `--rounds` times by turns, and says whether the bars are met: memory within 5 %, time within 10 %
for nine of ten and within 20 % for all. Each number of ranks is calibrated before and after each round of its configurations,
since the speed of a shared host changes within minutes. On GPUs plans are for the fastest calibration, as the fastest start counts.
A CPU's speed changes within seconds: plans are the medians of those for all calibrations, and matmuls that are timed beside each
step tell how fast the CPU was then; with that plans and steps are told at one speed, and the median of the starts counts.
`--list` shows the configurations, `--report FILE.json` makes table and plot from a result. A result is added to: on one, two and
four GPUs of the same kind, one after the other. `--again FILE.json` plans what was measured again, with `--machine` or as it was
calibrated, and shows both errors; it needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

import torch

from benchmarks.common import (
    AVERAGED_S,
    add_output,
    check_out,
    how_it_ended,
    machine,
    median,
    rounds_of,
    start_ranks,
    write,
)
from benchmarks.foresight.again import compared, planned_again
from benchmarks.foresight.configurations import Configuration, configurations, planned, runnable
from benchmarks.foresight.report import report, verdict_lines
from benchmarks.power import PowerLog
from meshfold.mesh import MeshfoldError
from meshfold.planner import Machine, find_machine

WORKER = Path(__file__).with_name("worker.py")
Plans = Mapping[str, tuple[Configuration, Mapping[str, Any]]]
"""Configurations to measure, with the seconds and bytes that are planned for each."""


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench foresight`; 1 if a bar is missed."""
    args = _arguments(argv)
    if args.report:
        return report(args.report)
    known = configurations()
    if args.list:
        print("\n".join(f"{name:<26} {one.ranks} {one.device:<5} {_words(one)}" for name, one in known.items()))
        return 0
    if args.again:
        return again(args.again, args)
    check_out(args.out)
    with tempfile.TemporaryDirectory(prefix="foresight-") as folder:
        fitting, result, found = _fitting(known, args), _opened(args), 0
        # Links differ with the number of ranks, and so does a rank's share of a host: one machine for each number.
        for ranks in sorted({one.ranks for one in fitting.values()}):
            here = _machine(args, ranks, Path(folder))
            wanted = {name: one for name, one in fitting.items() if one.ranks == ranks}
            plans = [(here, _planned(wanted, here, Path(folder)))]
            chosen = plans[0][1]
            for name, (one, _) in chosen.items():
                result["configurations"][name] = {"configuration": asdict(one), "runs": []}
            _note_plans(result, ranks, plans)
            for turn, names in enumerate(rounds_of(list(chosen), args.rounds if chosen else 0)):
                measure(names, turn, ranks, result, args, Path(folder))
                if not args.machine:
                    here = _machine(args, ranks, Path(folder))
                    plans.append((here, _planned({name: wanted[name] for name in chosen}, here, Path(folder))))
                    _note_plans(result, ranks, plans)
                    write(args.out, result)
            found += len(chosen)
        if not found:
            raise SystemExit("no configuration fits the ranks and the memory here; see --list, --device and --ranks")
    report(args.out)
    return int(any(not ok for _, ok in verdict_lines(result)))


def again(path: Path, args: argparse.Namespace) -> int:
    """Plan a result's configurations again and print both errors; 1 if a bar is missed."""
    before = json.loads(path.read_text())
    with tempfile.TemporaryDirectory(prefix="foresight-") as folder:
        chosen = find_machine(args.machine) if args.machine else None
        after = planned_again(before, chosen, args.only, Path(folder))
    if not after["configurations"]:
        raise SystemExit(f"{path} has no measured configuration of these names")
    print(compared(before, after))
    return int(any(not ok for _, ok in verdict_lines(after)))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="meshfold bench foresight", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: GPUs where there are some)")
    parser.add_argument("--ranks", type=int, help="ranks at hand (default: the GPUs, or 2 without one)")
    parser.add_argument("--exactly", type=int, help="only configurations of so many ranks")
    parser.add_argument(
        "--machine", metavar="NAME|FILE", help="a preset, or a file of meshfold calibrate, instead of calibrating"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="see --list")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each configuration, by turns")
    parser.add_argument("--window-s", type=float, default=3.0, help="seconds of timed steps in a start")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="seconds after which no configuration is begun")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without a new result that end the ranks")
    parser.add_argument(
        "--again", metavar="FILE.json", type=Path, help="plan the measured configurations of a result again"
    )
    parser.add_argument("--list", action="store_true", help="the configurations")
    add_output(parser, "foresight")
    args = parser.parse_args(argv)
    args.begun = time.time()
    gpus = torch.cuda.device_count()
    args.device = args.device or ("cuda" if gpus else "cpu")
    args.ranks = args.ranks or (gpus if args.device == "cuda" else 2)
    if args.device == "cuda" and args.ranks > gpus:
        raise SystemExit(f"--ranks {args.ranks}, and torch sees {gpus} GPUs: give fewer, or --device cpu")
    return args


def _words(one: Configuration) -> str:
    """Return a configuration in a line."""
    model = " ".join([one.model or "hf", *(one.changes or one.hf)])
    more = [f"recompute={one.recompute}"] if one.recompute else []
    more += [f"accumulate={one.accumulate}"] if one.accumulate > 1 else []
    return ", ".join([model, one.parallel, f"{one.batch} x {one.seq_len}", one.precision, *more])


def _opened(args: argparse.Namespace) -> dict[str, Any]:
    """Return the result to add to: the file's, if it is of the same parts and versions, else a new one."""
    here = {key: value for key, value in machine().items() if key != "gpus"}
    fresh: dict[str, Any] = {"area": "foresight", "machine": here, "configurations": {}}
    if not args.out.exists():
        return fresh
    found: dict[str, Any] = json.loads(args.out.read_text())
    if found["machine"] != here:
        raise SystemExit(f"{args.out} is of another machine: give another --out")
    return found


def _fitting(known: Mapping[str, Configuration], args: argparse.Namespace) -> dict[str, Configuration]:
    """Return the configurations that were asked for and that devices here can hold."""
    names = args.only or list(known)
    if strangers := [name for name in names if name not in known]:
        raise SystemExit(f"there is no configuration {strangers[0]!r}; --list shows them")
    memory = float(torch.cuda.get_device_properties(0).total_memory) if args.device == "cuda" else 2.0**60
    found = runnable({name: known[name] for name in names}, device=args.device, ranks=args.ranks, memory=memory)
    return {name: one for name, one in found.items() if args.exactly in (None, one.ranks)}


def _planned(fitting: Mapping[str, Configuration], here: Machine, folder: Path) -> Plans:
    """Return the configurations to measure, with what is planned for each."""
    chosen = {}
    for name, one in fitting.items():
        try:
            foreseen = planned(one, here, folder / name)
        except MeshfoldError as error:
            print(f"{name}: not planned: {error}", file=sys.stderr)
            continue
        if foreseen.misfit:
            print(f"{name}: left out, as planned: {foreseen.misfit}", flush=True)
            continue
        paced = {"paced": foreseen.paced} if here.kind == "cpu" else {}
        chosen[name] = (one, {"seconds": foreseen.seconds, "bytes": foreseen.bytes, **paced})
        print(f"{name:<26} planned {foreseen.seconds:.4g} s, {foreseen.bytes / 2**30:.3f} GiB", flush=True)
    return chosen


def _machine(args: argparse.Namespace, ranks: int, folder: Path) -> Machine:
    """Return the machine to plan for: the given one, or the one here measured with so many ranks."""
    if args.machine:
        return find_machine(args.machine)
    file = folder / f"machine-{ranks}.json"
    print(f"calibrating with {ranks} ranks", flush=True)
    words = ["calibrate", "--ranks", str(ranks), "--device", args.device, "--out", str(file)]
    code = subprocess.run([sys.executable, "-m", "meshfold.cli", *words], check=False).returncode  # it keeps no memory
    if code:
        raise SystemExit(code)
    return find_machine(str(file))


def _note_plans(result: dict[str, Any], ranks: int, plans: Sequence[tuple[Machine, Plans]]) -> None:
    """Write the plans of several calibrations: those of the one by which all configurations together are quickest.

    On a CPU the medians of all, told at the speed of the calibration whose speed is in the middle.

    Args:
        result: to write to; it has the configurations.
        ranks: of the configurations.
        plans: each calibration, with what it plans. One that does not plan all of them is left out.
    """
    most = max(len(chosen) for _, chosen in plans)
    rising = sorted(
        (one for one in plans if len(one[1]) == most),
        key=lambda one: (one[0].pace, sum(plan["seconds"] for _, plan in one[1].values())),
    )
    here, chosen = rising[(len(rising) - 1) // 2 if rising[0][0].kind == "cpu" else 0]
    result.setdefault("calibrated", {})[str(ranks)] = asdict(here)
    for name, (_, foreseen) in chosen.items():
        seconds = [_at_pace(machine, others[name][1], here.pace) for machine, others in rising]
        same = {"seconds": median(seconds)} if here.kind == "cpu" else {}
        result["configurations"][name]["planned"] = {**foreseen, **same}


def _at_pace(machine: Machine, plan: Mapping[str, Any], pace: float) -> float:
    """Return a plan's seconds on a CPU that multiplies and launches at another pace than the machine that was planned for."""
    seconds, paced = plan["seconds"], plan.get("paced", 0.0)
    found: float = seconds * (paced * pace / machine.pace + 1 - paced) if machine.pace and pace else seconds
    return found


def measure(
    names: Sequence[str], turn: int, ranks: int, result: dict[str, Any], args: argparse.Namespace, folder: Path
) -> None:
    """Train configurations of one number of ranks one after the other, and write the result after each start of ranks."""
    waiting = list(names)
    while waiting:
        out = folder / f"found-{ranks}-{turn}-{len(waiting)}.jsonl"
        job = {
            "names": waiting,
            "out": str(out),
            "folder": str(folder),
            "device": args.device,
            "window_s": args.window_s,
            "until": args.begun + args.budget_s,
        }
        with PowerLog() if args.device == "cuda" else nullcontext() as power:
            ended, said = start_ranks(WORKER, [json.dumps(job)], ranks, args.timeout)
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        done = outcomes(lines, how_it_ended(ended, said, args.timeout) if ended != 0 else "")
        if ended != 0:
            print(said[-3000:], file=sys.stderr)
            if not done:
                raise SystemExit(f"the ranks did not start: {how_it_ended(ended, said, args.timeout)}")
        for name, run in done.items():
            span = run.pop("first", 0.0) + AVERAGED_S, run.pop("last", 0.0)
            run.update(power.mean(*span, ranks) if power is not None else {})
            result["configurations"][name]["runs"].append(run)
        write(args.out, result)
        waiting = [] if ended == 0 else [name for name in waiting if name not in done]


def outcomes(lines: Sequence[Mapping[str, Any]], ending: str) -> dict[str, dict[str, Any]]:
    """Return the outcome of each configuration that was begun on a start of ranks.

    Args:
        lines: that ranks wrote: ``begun``, then a result or an error, of which several ranks may have one.
        ending: why the ranks ended early, for the configuration that was running; empty: they did not.
    """
    done: dict[str, dict[str, Any]] = {}
    for line in lines:
        run = {key: value for key, value in line.items() if key != "name"}
        if "begun" in line:
            if ending:
                done.setdefault(line["name"], {"error": ending})
        elif done.get(line["name"], {}).get("error", ending) == ending:  # the first that a rank wrote itself
            done[line["name"]] = run
    return done


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
