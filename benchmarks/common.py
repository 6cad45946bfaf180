"""Steps that every benchmark takes: read arguments, describe the machine, start ranks, time contestants interleaved, write JSON."""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_times import lines_of
from benchmarks.power import PowerLog, has_power

RESULTS = Path(__file__).parent / "results"
LONG_S = 2.0
"""A step of so many seconds is not made more often than it must be."""
AVERAGED_S = 1.0
"""nvidia-smi's power is an average over this time: samples in the first second of a window are of the contestant before."""
_LAUNCH = (
    "import sys; from meshfold.mesh.processes import launch; raise SystemExit(launch(sys.argv[2:], int(sys.argv[1])))"
)


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """Add ``--out``, which is ``results/NAME.json`` unless given, and ``--report``."""
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    parser.add_argument("--report", type=Path, help="make table and plot from this JSON instead of measuring")


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of :func:`measure`: ``--rounds``, ``--window-s`` and ``--settle-s``."""
    parser.add_argument("--rounds", type=int, default=5)
    add_windows(parser)


def add_windows(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of :func:`timed_windows` and :func:`energy_windows`: ``--window-s`` and ``--settle-s``."""
    parser.add_argument("--window-s", type=float, default=2.5, help="seconds of a contestant in a round")
    parser.add_argument("--settle-s", type=float, default=20.0, help="least seconds of warm-up: clocks settle")


def add_starts(parser: argparse.ArgumentParser, *, steps: int, warm_up: int, settle_s: float, timeout: float) -> None:
    """Add the arguments of contestants that train in processes of their own, by turns, with these defaults."""
    parser.add_argument("--rounds", type=int, default=1, help="starts of each contestant, by turns")
    parser.add_argument("--steps", type=int, default=steps, help="timed steps of a start")
    parser.add_argument("--warm-up", type=int, default=warm_up, help="least number of steps before them")
    parser.add_argument("--settle-s", type=float, default=settle_s, help="least seconds of warm-up: clocks settle")
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds for one start")
    parser.add_argument("--profile", action="store_true", help="add a profile of one step by kernels")


def start_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return what :func:`benchmarks.timed_training.train` reads of :func:`add_starts`' arguments."""
    return {name: getattr(options, name) for name in ("steps", "warm_up", "settle_s", "profile")}


def rounds_of(names: Sequence[str], rounds: int) -> list[Sequence[str]]:
    """Return the contestants of each round, every second round backwards."""
    return [names if turn % 2 == 0 else names[::-1] for turn in range(rounds)]


def by_turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Yield the contestants of all rounds, one after the other."""
    for each in rounds_of(names, rounds):
        yield from each


def result_to_extend(path: Path, area: str, *packages: str) -> dict[str, Any]:
    """Return the result that cases are added to: the one in the file if it is of this machine, else a new one.

    Args:
        path: of the JSON.
        area: of the benchmark.
        packages: distributions whose versions belong to the machine.

    Raises:
        SystemExit: if the file is of another machine.
    """
    fresh: dict[str, Any] = dict(area=area, machine={**machine(), **package_versions(*packages)}, cases={})
    if not path.exists():
        return fresh
    known: dict[str, Any] = json.loads(path.read_text())
    if known["machine"] != fresh["machine"]:
        raise SystemExit(f"{path} is of another machine: give another --out")
    return known


def parse_with_tiny(
    parser: argparse.ArgumentParser, argv: Sequence[str], tiny: Mapping[str, Any]
) -> argparse.Namespace:
    """Add ``--tiny`` and parse; with it, ``tiny`` has the defaults."""
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the command without GPUs")
    if "--tiny" in argv:
        parser.set_defaults(**tiny)
    return parser.parse_args(argv)


def check_contestants(parser: argparse.ArgumentParser, names: Sequence[str], known: Collection[str]) -> None:
    """End with one sentence if ``--only`` names a contestant that there is not."""
    from meshfold.cli.arguments import nearest

    for name in names:
        if name not in known:
            parser.error(
                f"--only {name!r}: there is no such contestant.{nearest(name, known)} There are: {', '.join(map(repr, known))}"
            )


@dataclass
class Contestant:
    """One way to do the work.

    Attributes:
        name: what the table calls it.
        step: does the work once.
        note: why it could not run, or what is special about it.
        peak_bytes: largest memory it used beyond what was there before it, where measured.
        error: relative error of its result against the reference.
        parts: of the step, by name, that are timed by themselves too, after all rounds.
        around: makes what holds while it runs.
        warm: steps have been made already: nothing more is compiled or captured.
        last_ms: milliseconds of a step that was made already; 0 if none was timed.
        known_ms: milliseconds of a step, of one that is not run again; 0: it is timed.
    """

    name: str
    step: Callable[[], Any] | None = None
    note: str = ""
    peak_bytes: int = 0
    error: float = float("nan")
    parts: dict[str, Callable[[], Any]] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    warm: bool = False
    last_ms: float = 0.0
    known_ms: float = 0.0


def machine() -> dict[str, Any]:
    """What the numbers were measured on: no names of hosts, only kinds of parts and versions."""
    from meshfold.mesh.processes import usable_cores

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_cores": usable_cores(),
        "gpus": torch.cuda.device_count(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    return found


def start_ranks(script: Path, words: Sequence[str], ranks: int, timeout: float) -> tuple[int | None, str]:
    """Run a program on so many local ranks until it ends.

    Args:
        script: the program.
        words: its arguments.
        ranks: how many processes.
        timeout: seconds after which they are ended.

    Returns:
        What the launcher exited with (None: it was ended), and what all have printed.
    """
    command = [sys.executable, "-c", _LAUNCH, str(ranks), str(script.resolve()), *words]
    with tempfile.TemporaryFile() as out:
        running = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            ended: int | None = running.wait(timeout)
        except subprocess.TimeoutExpired:
            running.terminate()
            running.wait(30)
            ended = None
        out.seek(0)
        return ended, out.read().decode(errors="replace")


_WHY = re.compile(
    r"\b\w*(Error|Exception|Interrupt)\b|CUDA error|what\(\):|out of memory|corrupt|(free|malloc)\(\)|Assertion"
)
_ABORTED = re.compile("Fatal Python error|<no Python frame>|most recent call first")
"""Lines that Python prints of every abort, behind the C library's that tells it."""
_NOT_WHY = re.compile(r"Extension modules:|^\s*File \"")
"""Lines of a list of modules, and of a stack: Python prints both behind the error when a process is aborted."""


def first_step_file(out: str | Path) -> Path:
    """Return the file beside a contestant's result that has the seconds until the end of its first step."""
    return Path(out).with_suffix(".first")


def how_it_ended(ended: int | None, said: str, timeout: float, *, first_step: bool = True) -> str:
    """In a few words, with the last line that tells an error, else the last one; ``first_step``: at least one step had ended."""
    if ended is None:
        return f"stopped after {timeout:g} s" + ("" if first_step else ", before the end of its first step")
    lines = [line.strip() for line in said.splitlines() if line.strip() and not _NOT_WHY.search(line)]
    own = [line for line in lines if not _ABORTED.search(line)]
    told = [line for line in own if _WHY.search(line)] or own or lines or [""]
    return f"ended with {ended}: {told[-1][:200]}"


def run_contestant(
    worker: Path, job: dict[str, Any], timeout: float, why: Callable[[str], str] = lambda said: ""
) -> dict[str, Any]:
    """Run one start of a contestant in processes of its own; print its profile, if it made one.

    Args:
        worker: the program; it gets the job as JSON and writes its result to the job's ``out``.
        job: with the number of ``ranks``.
        timeout: seconds after which it is ended.
        why: finds the reason of a failure in what was printed; empty if there is none.

    Returns:
        The result with mean watts and clock, or ``error``; ``stopped`` says why it has fewer steps. ``first_step_s``, the seconds
        until the end of its first step, is in it if it came so far.
    """
    with tempfile.TemporaryDirectory(prefix="contestant-") as folder, PowerLog() as power:
        out = Path(folder) / "found.json"
        ended, said = start_ranks(worker, [json.dumps({**job, "out": str(out)})], job["ranks"], timeout)
        if ended or not out.exists():
            print("\n".join(line for line in said.splitlines() if not _NOT_WHY.search(line))[-6000:], file=sys.stderr)
            first = first_step_file(out)
            known = {"first_step_s": json.loads(first.read_text())} if first.exists() else {}
            return {"error": why(said) or how_it_ended(ended, said, timeout, first_step=bool(known)), **known}
        run: dict[str, Any] = json.loads(out.read_text())
    if "error" in run:
        return run
    if ended is None:
        run["stopped"] = how_it_ended(None, "", timeout, first_step=True)
    run.update(power.mean(run.pop("first"), run.pop("last"), job["ranks"]))
    if kernels := run.pop("profile", None):
        print("\n".join([*lines_of(kernels), *run.pop("profile_host", ())]))
    return run


def package_versions(*names: str) -> dict[str, Any]:
    """Return the versions of installed distributions; None for one that is not."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def host_peak_bytes() -> int:
    """Return the most host memory that this process had resident at a time, libraries and pinned memory included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(step: Callable[[], Any], repeats: int) -> float:
    """Mean time of a few steps in a row, by events on the GPU, by the clock on the CPU."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) * 1e3 / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def interleave(contestants: Sequence[Contestant], *, rounds: int, warm_up: int, repeats: int) -> dict[str, list[float]]:
    """Rounds A B C A B C of all contestants that can run: milliseconds a step, by name."""
    running = [c for c in contestants if c.step is not None]
    for contestant in running:
        for _ in range(warm_up):
            contestant.step()  # type: ignore[misc]
        synchronize()
    times: dict[str, list[float]] = {c.name: [] for c in running}
    for _ in range(rounds):
        for contestant in running:
            times[contestant.name].append(milliseconds(contestant.step, repeats))  # type: ignore[arg-type]
    return times


Timed = tuple[dict[str, list[float]], dict[str, dict[str, float]]]
"""By name of a contestant: the milliseconds a step of each round, and the mean watts and MHz."""


def timed_windows(
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    window_s: float,
    settle_s: float,
    between: Callable[[], None] = lambda: None,
    agreed: Callable[[float], float] = float,
    gpus: int = 1,
) -> Iterator[Timed]:
    """Time rounds A B C A B C, each contestant for a window of seconds, after a warm-up in which clocks settle.

    Args:
        contestants: those without a step are left out.
        rounds: how often each is timed.
        window_s: seconds of a contestant in a round.
        settle_s: seconds of warm-up, of the first contestant.
        between: called before each window, so that all ranks start together.
        agreed: makes a number of this rank one that all ranks have, so that all take as many steps.
        gpus: whose watts are added up; 0: none are read, as on ranks that write nothing.

    Yields:
        What was measured until then, after each contestant of the first round and after each round; last, all of it with the power.
    """
    running = [each for each in contestants if each.step is not None]

    def lasting(each: Contestant) -> float:
        """Return the milliseconds of a step; one that fills a window by itself is not made again for that."""
        known = agreed(each.last_ms)
        return known if known > max(window_s, LONG_S) * 1e3 else agreed(in_window(each, 2))

    def in_window(each: Contestant, steps: int) -> float:
        with each.around():
            if each.around is not nullcontext:
                each.step()  # type: ignore[misc]  # what is looked up anew in each context is not timed
            between()
            return milliseconds(each.step, steps)  # type: ignore[arg-type]

    lasts = {each.name: lasting(each) for each in running}
    if running and settle_s:
        with running[0].around():
            for _ in range(math.ceil(settle_s * 1e3 / lasts[running[0].name])):
                running[0].step()  # type: ignore[misc]
                synchronize()
        lasts = {each.name: lasting(each) for each in running}
    repeats = {name: max(1, math.ceil(window_s * 1e3 / each)) for name, each in lasts.items()}
    times: dict[str, list[float]] = {each.name: [] for each in running}
    windows: dict[str, list[tuple[float, float]]] = {each.name: [] for each in running}
    with PowerLog() if gpus else nullcontext() as log:
        for turn in range(rounds):
            for each in running:
                first = time.time()
                times[each.name].append(in_window(each, repeats[each.name]))
                windows[each.name].append((first + AVERAGED_S, time.time()))
                if not turn or each is running[-1]:
                    done = {name: list(values) for name, values in times.items() if values}
                    yield done, {name: {} for name in done}
    power: dict[str, dict[str, float]] = {name: {} for name in times}
    for name, spans in windows.items():
        means = [mean for span in spans if log is not None and (mean := log.mean(*span, gpus))]
        power[name] = {key: sum(mean[key] for mean in means) / len(means) for key in ("watts", "mhz") if means}
    yield times, power


def energy_windows(contestants: Sequence[Contestant], *, ranks: int, **given: Any) -> dict[str, dict[str, float]]:
    """Let each contestant work for a window of seconds, after a warm-up in which clocks settle, and sample power.

    Args:
        contestants: those without a step are left out.
        ranks: number of this group's ranks, one a GPU.
        given: see :func:`timed_windows`: ``window_s``, ``settle_s``, ``between``, ``agreed`` and ``gpus``.

    Returns:
        By name ``watts`` of all GPUs together, ``mhz`` of one and ``milliseconds`` a step in the window, on the rank that reads
        them. Nothing where there is no GPU for each rank, or no `nvidia-smi`: then no time is spent.
    """
    if not has_power() or torch.cuda.device_count() < ranks:
        return {}
    times, power = list(timed_windows(contestants, rounds=1, **given))[-1]
    return {name: dict(found, milliseconds=median(times[name])) for name, found in power.items() if found}


def agree(device: torch.device, group: Any = None) -> Callable[[float], float]:
    """Return what makes a number of this rank the largest of all ranks'."""

    def agreed(value: float) -> float:
        told = torch.tensor(value, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=group)
        return float(told)

    return agreed


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def ratios(ours: Sequence[float], peer: Sequence[float]) -> tuple[float, float, float]:
    """(median, lowest, highest) over rounds of peer's time by ours: above 1, ours is faster."""
    paired = [p / o for o, p in zip(ours, peer, strict=True)]
    return median(paired), min(paired), max(paired)


def new_call() -> str:
    """Name this call of a benchmark: ratios are taken between contestants of one call, so of one machine, only."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}-{secrets.token_hex(3)}"


def check_out(path: Path) -> None:
    """Before anything is measured: whether the result can be written. To be called before the ranks are started.

    Raises:
        Failure: if it cannot.
    """
    import os

    from meshfold.cli.arguments import Failure

    if path.is_dir():
        raise Failure(f"--out {path} is a folder: name a file in it, such as {path / 'result.json'}")
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not os.access(there, os.W_OK) or (there != path.absolute() and not there.is_dir()):
        raise Failure(f"--out {path} cannot be written to: give another file")


def write(path: Path, result: Mapping[str, Any]) -> None:
    """One JSON file, readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, allow_nan=True) + "\n")
