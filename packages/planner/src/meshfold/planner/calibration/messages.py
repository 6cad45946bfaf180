"""Samples of collectives over a group of running ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from meshfold.mesh import (
    Group,
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    moved_bytes,
    reduce_scatter,
    shift,
)
from meshfold.mesh.recording import Kind
from meshfold.planner.calibration.fits import MessageSample
from meshfold.planner.calibration.samples import three_matmuls
from meshfold.planner.calibration.timing import Effort, MiB, wait

_CALLS, _MOST_CALLS = 5, 100
_SIDE_BETWEEN = 384  # of matmuls: 3 ms on a core
_SENDS, _MATMULS = 4, 8
_BUCKET = 16 * MiB  # of gradients, at most: a message on a CPU
KINDS: dict[Kind, Callable[[Tensor, Group], object]] = {
    "all_reduce": lambda x, group: all_reduce(x, group),
    "all_gather": lambda x, group: all_gather(x, group, 0),
    "reduce_scatter": lambda x, group: reduce_scatter(x, group, 0),
    "all_to_all": lambda x, group: all_to_all(x.view(group.size, -1), group, 0, 1),
    "broadcast": lambda x, group: broadcast(x, group, 0),
    "shift": lambda x, group: shift(x, group),
}
"""Measured kinds. ``send`` has the seconds of ``shift``, which sends and receives at the same time."""
_BESIDE: dict[Kind, Callable[[Tensor, Group], Pending]] = {
    "all_gather": lambda x, group: all_gather(x, group, 0, async_op=True),
    "reduce_scatter": lambda x, group: reduce_scatter(x, group, 0, async_op=True),
    "all_reduce": lambda x, group: all_reduce(x, group, async_op=True),
}
"""Collectives that run beside matmuls in training."""


def message_samples(
    group: Group, device: torch.device, effort: Effort, kinds: Iterable[Kind] = tuple(KINDS)
) -> list[MessageSample]:
    """Measure kinds for every size: seconds of the slowest rank, between barriers. All ranks of the group must call.

    Ranks on a CPU multiply before each call, as in training, where they do not arrive at the same time and the library's threads
    sleep: the mean of their seconds counts, which has half of what the earlier one waits, as much as the later one lost.

    Args:
        group: of two ranks or more.
        device: of the tensors.
        effort: gives the sizes of blocks: of the result in a gather, of a rank's operand in a sum.
        kinds: by default all of ``KINDS``.
    """
    found = []
    for kind in kinds:
        run = KINDS[kind]
        for size in _blocks(group.size, effort):
            mine = size // group.size if kind == "all_gather" else size
            x = torch.zeros(mine // 4, device=device)
            timed = _seconds_between_matmuls if device.type == "cpu" else _agreed_seconds
            seconds = timed(lambda: run(x, group), group, device, effort)  # noqa: B023
            found.append(MessageSample(kind=kind, sent=float(moved_bytes(kind, size, group.size)), seconds=seconds))
            if seconds * 4 > effort.longest_s:
                break
    return found


def _blocks(ranks: int, effort: Effort) -> list[int]:
    """Return the bytes of blocks, each a multiple of what all ranks have an element of."""
    return [max(ranks * 4, size // (ranks * 4) * ranks * 4) for size in effort.message_bytes]


def sizes_of(kind: Kind, ranks: int, effort: Effort) -> list[float]:
    """Return the bytes that a rank sends in each sample of a kind, in a group of so many ranks."""
    return [float(moved_bytes(kind, size, ranks)) for size in _blocks(ranks, effort)]


def hidden_of(collectives: float, matmuls: float, together: float) -> float:
    """Return the share of the shorter one that the longer one hides, given the seconds of each alone and of both at once."""
    return min(1.0, max(0.0, (collectives + matmuls - together) / min(collectives, matmuls)))


def hidden_shares(group: Group, device: torch.device, effort: Effort) -> dict[str, float]:
    """Measure the share of collectives that matmuls hide, with equally long runs of both, by kind.

    On a GPU they run on two streams, on a CPU a thread of the library's carries collectives, on the cores that multiply. Runs are
    long, so that clocks fall as in training where power is limited. All ranks of the group must call.
    """
    long = replace(effort, window_s=effort.beside_s, repeats=2)
    on_gpu = device.type == "cuda"
    side = effort.sides[-1] // 2 if on_gpu else effort.sides[len(effort.sides) // 2]
    dtype = torch.bfloat16 if on_gpu else torch.float32
    message_bytes = effort.message_bytes[-1] if on_gpu else min(effort.message_bytes[-1], _BUCKET)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    beside = torch.cuda.Stream(device) if on_gpu else None

    def multiply(times: int) -> None:
        for _ in range(times):
            a @ b

    def begin(kind: Kind, block: Tensor) -> list[Pending]:
        """Start collectives; return what must be waited for after the matmuls."""
        if beside is None:
            return [_BESIDE[kind](block, group)]
        with torch.cuda.stream(beside):
            for _ in range(_SENDS):
                KINDS[kind](block, group)
        return []

    def run(kind: Kind, block: Tensor, times: int) -> None:
        pending = begin(kind, block)
        multiply(times)
        for one in pending:
            one.wait()

    each = _agreed_seconds(lambda: multiply(_MATMULS), group, device, long) / _MATMULS
    found: dict[str, float] = {}
    for kind in _BESIDE:
        count = message_bytes // dtype.itemsize // group.size * (1 if kind == "all_gather" else group.size)
        block = torch.zeros(count, dtype=dtype, device=device)

        alone = _agreed_seconds(partial(run, kind, block, 0), group, device, long)
        times = max(1, round(alone / each))
        together = _agreed_seconds(partial(run, kind, block, times), group, device, long)
        found[kind] = hidden_of(alone, times * each, together)
    return found


def _agreed_seconds(work: Callable[[], object], group: Group, device: torch.device, effort: Effort) -> float:
    """Return the slowest rank's seconds in the fastest of several timings: the same number on all ranks."""

    def timed(calls: int) -> float:
        barrier(group, device)
        wait(device)
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        wait(device)
        return (time.perf_counter() - begin) / calls

    def slowest(times: list[float]) -> Tensor:
        return all_reduce(torch.tensor(times, dtype=torch.float64, device=device), group, op="max")

    timed(_CALLS)
    once = max(float(slowest([timed(_CALLS)])), 1e-9)
    calls = max(_CALLS, min(_MOST_CALLS, math.ceil(effort.window_s / once)))  # the same on all ranks
    return max(float(slowest([timed(calls) for _ in range(effort.repeats)]).min()), 1e-9)


def _seconds_between_matmuls(work: Callable[[], object], group: Group, device: torch.device, effort: Effort) -> float:
    """Return the seconds of a collective of ranks on a CPU that multiply before each call: the same number on all ranks.

    Of several timings the median, and of the ranks the mean.
    """
    multiply = three_matmuls(min(_SIDE_BETWEEN, effort.sides[-1]), torch.float32, device)

    def timed() -> float:
        barrier(group, device)
        spent = 0.0
        for _ in range(_CALLS):
            multiply()
            begin = time.perf_counter()
            work()
            spent += time.perf_counter() - begin
        return spent / _CALLS

    timed()
    found = torch.tensor([timed() for _ in range(effort.repeats)], dtype=torch.float64)
    return max(float(all_reduce(found, group).median()) / group.size, 1e-9)
