"""Collectives by pushes beside NCCL's: time alone, and what each costs a matmul that runs at the same time.

NCCL copies by kernels, which take multiprocessors from the matmul; a push copies by copy engines. All ranks of one machine, a
GPU each. `meshfold bench push --ranks 2` prints a table and writes JSON; without GPUs it runs in small, for trying it out. Joules
and clocks are those of a window of seconds in which the collective and the matmul beside it are repeated.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch
from torch import Tensor

from benchmarks import reports
from benchmarks.common import (
    RESULTS,
    Contestant,
    agree,
    check_out,
    energy_windows,
    machine,
    median,
    synchronize,
    write,
)

KINDS = ("all_gather", "reduce_scatter")
WAYS = ("nccl", "push")


def main(argv: list[str]) -> int:
    """Entry point of `meshfold bench push`."""
    parser = argparse.ArgumentParser(prog="meshfold bench push", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="local ranks, one a GPU where there are as many")
    parser.add_argument("--mib", default="1,4,16,32,64", help="sizes of a rank's block in MiB, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=20, help="calls a timing")
    parser.add_argument(
        "--matmul", default="8192,7168,4096", help="rows, columns and summed dim of the matmul beside it"
    )
    parser.add_argument("--settle-s", type=float, default=3.0, help="seconds of matmuls first: clocks settle")
    parser.add_argument("--window-s", type=float, default=2.5, help="seconds of each way in which power is sampled")
    parser.add_argument("--out", type=Path, default=RESULTS / "push.json")
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        check_out(args.out)
        from meshfold.mesh.processes import launch

        return launch([str(Path(__file__).resolve()), *argv], args.ranks)
    return _measure(args)


class Beside:
    """A matmul, repeated until it lasts longer than what runs beside it."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> None:
        m, n, k = shape
        self.a = torch.randn(m, k, device=device).to(dtype)
        self.b = torch.randn(k, n, device=device).to(dtype)
        self.out = torch.empty(m, n, device=device, dtype=dtype)
        self.times = 1

    def __call__(self) -> None:
        for _ in range(self.times):
            torch.mm(self.a, self.b, out=self.out)


def _measure(args: argparse.Namespace) -> int:
    from meshfold.mesh import Mesh, barrier
    from meshfold.mesh.collectives import push
    from meshfold.mesh.processes import process_group

    world = process_group.start()
    device = world.device
    group = Mesh({"tensor": args.ranks}).group("tensor")
    dtype = torch.bfloat16
    reason = push.why_not(group, device)
    m, n, k = (int(word) for word in args.matmul.split(","))
    beside = Beside((m, n, k), device, dtype)
    _settle(beside, args.settle_s)
    found: dict[str, Any] = {}
    for mib in (float(word) for word in args.mib.split(",")):
        for kind in KINDS:
            block = torch.randn(int(mib * 2**20) // dtype.itemsize, device=device).to(dtype)
            x = block if kind == "all_gather" else block.repeat(args.ranks)
            starts = {way: _start(kind, way, x, group) for way in WAYS if way == "nccl" or not reason}
            beside.times = max(1, round(mib / 16))  # about 0.7 ms of matmul for each 16 MiB, which take 0.05 to 0.1
            row = _compare(starts, beside, args, lambda: barrier(group, device))
            row["bytes_a_rank_sends"] = block.numel() * dtype.itemsize * (args.ranks - 1)
            row["agrees"] = _agreement(starts)
            row["power"] = energy_windows(
                [Contestant(way, partial(_both, start, beside, 1), warm=True) for way, start in ways_of(starts)],
                ranks=args.ranks,
                gpus=args.ranks if world.rank == 0 else 0,
                window_s=args.window_s,
                settle_s=0.0,  # they have, before the first case
                between=lambda: barrier(group, device),
                agreed=agree(device),
            )
            found[f"{kind} {mib:g} MiB"] = row
    if world.rank == 0:
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        result = dict(area="push", machine=machine(), settings=settings, cases=found, no_push=reason)
        write(args.out, result)
        print(table(result))
    world.close()
    return 0


def ways_of(starts: dict[str, Callable[[], Any]]) -> list[tuple[str, Callable[[], Any] | None]]:
    """Return what runs beside the matmul, by name: nothing, and each way."""
    return [("matmul", None), *starts.items()]


def _settle(beside: Beside, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        beside()
        synchronize()


def _start(kind: str, way: str, x: Tensor, group: Any) -> Callable[[], Any]:
    """Return a function that starts the collective and returns what waits for it."""
    from meshfold.mesh import all_gather, reduce_scatter
    from meshfold.mesh.collectives import push

    if kind == "all_gather":
        return (
            (lambda: push.all_gather_push(x, group))
            if way == "push"
            else lambda: all_gather(x, group, 0, async_op=True)
        )
    return (
        (lambda: push.reduce_scatter_push(x, group))
        if way == "push"
        else lambda: reduce_scatter(x, group, 0, async_op=True)
    )


def _compare(
    starts: dict[str, Callable[[], Any]], beside: Beside, args: argparse.Namespace, together: Callable[[], None]
) -> dict[str, Any]:
    """Time the matmul alone, and each way alone and beside it, in interleaved rounds; milliseconds a call."""
    works: dict[str, Callable[[], float]] = {"matmul": lambda: _both(None, beside, args.repeats)[0]}
    times: dict[str, list[float]] = {"matmul": []}
    for way, start in starts.items():
        for what in ("alone", "host", "matmul beside", "both"):
            times[f"{way} {what}"] = []
        for _ in range(3):
            start().wait()
    for _ in range(2):
        beside()
    for _ in range(args.rounds):
        together()
        times["matmul"].append(works["matmul"]())
        for way, start in starts.items():
            together()
            alone, host = _alone(start, args.repeats)
            times[f"{way} alone"].append(alone)
            times[f"{way} host"].append(host)
            together()
            matmul, both = _both(start, beside, args.repeats)
            times[f"{way} matmul beside"].append(matmul)
            times[f"{way} both"].append(both)
    return {"milliseconds": times, "matmuls": beside.times}


def _alone(start: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Return (the time of a call, the part of it that the host takes to queue it)."""
    clock, begun = _Clock(), time.perf_counter()
    for _ in range(repeats):
        start().wait()
    host = time.perf_counter() - begun
    return clock.stop() / repeats, host * 1e3 / repeats


def _both(start: Callable[[], Any] | None, beside: Beside, repeats: int) -> tuple[float, float]:
    """Return (the matmuls' time, the time until both are done), mean of ``repeats``."""
    whole, spans = _Clock(), []
    for _ in range(repeats):
        pending = start() if start is not None else None
        span = _Clock(wait=False)
        beside()
        span.mark()
        spans.append(span)
        if pending is not None:
            pending.wait()
    total = whole.stop() / repeats
    return sum(span.read() for span in spans) / repeats, total


class _Clock:
    """Milliseconds between two points of the current stream; of the host without a GPU."""

    def __init__(self, wait: bool = True) -> None:
        self._now, self._gpu = time.perf_counter, torch.cuda.is_available()
        if wait:
            synchronize()
        self._begin = self._point()
        self._end: Any = None

    def _point(self) -> Any:
        if not self._gpu:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        self._end = self._point()

    def read(self) -> float:
        return float(self._begin.elapsed_time(self._end)) if self._gpu else (self._end - self._begin) * 1e3

    def stop(self) -> float:
        self.mark()
        synchronize()
        return self.read()


def _agreement(starts: dict[str, Callable[[], Any]]) -> float | None:
    """Return the largest difference between the results, relative to the largest value; a gather's must be 0."""
    if len(starts) < 2:
        return None
    a, b = (start().wait().float() for start in starts.values())
    return float((a - b).abs().max() / a.abs().max())


def table(result: dict[str, Any]) -> str:
    """Markdown: a row for each kind and size."""
    head = [
        "collective, block",
        "way",
        "alone, us",
        "host, us",
        "GB/s",
        "beside a matmul: matmul takes",
        "both, ms",
        "differs by",
    ]
    sampled = any(case.get("power") for case in result["cases"].values())
    head += ["J, both; matmul alone", "MHz"] if sampled else []
    rows = []
    for name, case in result["cases"].items():
        times = {key: median(values) for key, values in case["milliseconds"].items()}
        base = times["matmul"]
        for way in WAYS:
            if f"{way} alone" not in times:
                rows.append([name, way, result["no_push"]])
                continue
            alone = times[f"{way} alone"]
            rows.append(
                [
                    name,
                    way,
                    f"{alone * 1e3:.0f}",
                    f"{times[f'{way} host'] * 1e3:.0f}",
                    f"{case['bytes_a_rank_sends'] / alone / 1e6:.0f}",
                    f"{times[f'{way} matmul beside'] / base - 1:+.1%} of {base:.3f} ms",
                    f"{times[f'{way} both']:.3f}",
                    "" if case["agrees"] is None else f"{case['agrees']:.1e}",
                    *(_energy(case.get("power", {}), way) if sampled else ()),
                ]
            )
    return "\n".join(reports.table(head, rows))


def _energy(power: dict[str, dict[str, float]], way: str) -> tuple[str, str]:
    """Two cells: the joules of all GPUs in a call, beside and without the collective, and the clock in MHz."""
    if way not in power or "matmul" not in power:
        return "–", "–"
    both, alone = (f"{one['watts'] * one['milliseconds'] / 1e3:.3f}" for one in (power[way], power["matmul"]))
    return f"{both}; {alone}", f"{power[way]['mhz']:.0f}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
