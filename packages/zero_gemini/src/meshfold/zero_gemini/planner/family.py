"""The exact best plan of an ordered family: used for more chunks than can be searched exhaustively.

Chunks stand in an order. The first ``a`` chunks have state and parameters on the GPU, the last ``d`` have their state on disk, and
the last ``b`` of the others have resident parameters. The first ``k`` layers, in order of seconds saved per byte, keep their
activations. Cost and memory are linear, so four prefix sums give every member of the family. For given ``a`` the least ``d`` that
fits the host is best, and for every ``k`` the largest ``b``: all are tried. The family does not depend on the limits, so more
memory never gives a slower plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from meshfold.zero_gemini.planner.options import (
    ALL_GPU,
    DISK_RESIDENT,
    DISK_STREAMED,
    GPU_ONLY,
    HOST_RESIDENT,
    HOST_STREAMED,
    WITH_DISK,
    Choice,
    Floats,
    Ints,
    Table,
)
from meshfold.zero_gemini.planner.problem import Problem
from meshfold.zero_gemini.planner.workload import Workload

SPREAD_BELOW, SHUFFLED_BELOW = 128, 64
"""With fewer chunks, orders that spread the streamed ones, and shuffled orders, are tried too."""


def orders(workload: Workload) -> Iterator[Ints]:
    """Yield orders of the chunks, the order of use first. They do not depend on limits."""
    n = len(workload.chunks)
    sizes = np.array([chunk.gathered_elems for chunk in workload.chunks])
    index = np.arange(n)
    yield index
    if n < SPREAD_BELOW:  # alternate streamed and resident chunks: fewer are on the GPU at once
        yield np.concatenate([index[::2], index[1::2]])
        yield np.concatenate([index[1::2], index[::2]])
        yield np.array(sorted(range(n), key=lambda i: f"{i:08b}"[::-1]))
        yield np.concatenate([index[: n // 3], index[n // 3 :: 2], index[n // 3 + 1 :: 2]])
    if len(set(sizes.tolist())) > 1:
        yield np.argsort(sizes, kind="stable")
        yield np.argsort(-sizes, kind="stable")
    generator = random.Random(0)
    for _ in range(8 if n < SHUFFLED_BELOW else 0):
        yield np.array(generator.sample(range(n), n))


def layer_order(workload: Workload) -> Ints:
    """Return the layers by seconds saved per byte, most first; of equal ones the later first, which is kept for a shorter time.

    The results of a layer's attention come before its rest.
    """
    layers = workload.layers
    worth = [layer.recompute_seconds / max(layer.kept_bytes, 1) for layer in layers]
    for rest, attention in workload.attention_of().items():
        worth[rest] = min(worth[rest], worth[attention])
    return np.array(sorted(range(len(layers)), key=lambda j: (-worth[j], -j)), dtype=np.int64)


class _Sums:
    """Prefix sums of a table along an order, indexed by (count, row)."""

    def __init__(self, table: Table, order: Ints, layers: Ints, rows: slice = slice(None)) -> None:
        def prefix(steps: Floats) -> Floats:
            out = np.zeros((len(steps) + 1, steps.shape[1]))
            np.cumsum(steps, axis=0, out=out[1:])
            return out

        chunk = table.chunk[..., rows]
        last = order[::-1]
        streamed = chunk[:, HOST_STREAMED]
        self.a = (
            table.base[rows]
            + streamed.sum(0)
            + table.layer[:, 0, rows].sum(0)
            + prefix((chunk[:, ALL_GPU] - streamed)[order])
        )
        self.b = prefix((chunk[:, HOST_RESIDENT] - streamed)[last])
        self.d = prefix((chunk[:, DISK_STREAMED] - streamed)[last])
        self.k = prefix((table.layer[:, 1, rows] - table.layer[:, 0, rows])[layers])


class Family:
    """The family of one order."""

    def __init__(self, problem: Problem, order: Ints, layers: Ints) -> None:
        self.problem, self.order, self.layers = problem, order, layers
        timesteps = len(problem.limits) - 2
        self.memory = _Sums(problem.memory, order, layers, slice(0, timesteps))
        self.offloaded = _Sums(problem.memory, order, layers, slice(timesteps, None))
        self.gpu = problem.limits[:timesteps]
        self.host, self.disk = problem.limits[timesteps:]

    def choice(self, a: int, b: int, d: int, k: int) -> Choice:
        """Return the choice with ``a`` chunks on the GPU, ``b`` resident ones, ``d`` on disk, and ``k`` layers that are kept."""
        chunks = np.full(len(self.order), HOST_STREAMED)
        last = self.order[::-1]
        chunks[last[:d]] = DISK_STREAMED
        resident = last[:b]
        chunks[resident] = np.where(chunks[resident] == DISK_STREAMED, DISK_RESIDENT, HOST_RESIDENT)
        chunks[self.order[:a]] = ALL_GPU
        kept = np.zeros(len(self.layers), dtype=np.int64)
        kept[self.layers[:k]] = 1
        return Choice(chunks=chunks, layers=kept)

    def counts(self) -> Iterator[tuple[int, int, int]]:
        """Yield (a, least d, most d) for every ``a`` that can fit the host and the disk."""
        n = len(self.order)
        for a in [n] if self.problem.mode == GPU_ONLY else range(n + 1):
            most = n - a if self.problem.mode == WITH_DISK else 0
            on_disk = self.offloaded.d[: most + 1, 1] + self.offloaded.a[a, 1] <= self.disk
            fits = on_disk & (self.offloaded.d[: most + 1, 0] + self.offloaded.a[a, 0] <= self.host)
            if on_disk.any() and fits.any():
                yield a, int(fits.argmax()), int(on_disk.nonzero()[0][-1])

    def best(self, worst: float) -> tuple[float, Choice] | None:
        """Return the fastest member that fits, if it is faster than ``worst`` seconds."""
        time = _Sums(self.problem.time, self.order, self.layers)
        n, layers = len(self.order), len(self.layers)
        counts = [(a, d) for a, d, _ in self.counts() if (self.memory.a[a] <= self.gpu).all()]
        if not counts:
            return None
        a_, d_ = np.array(counts).T
        rest = n - a_
        bounds = self.problem.value(time.a[a_] + time.d[d_] + time.b[rest] + time.k[layers])
        found: tuple[int, int, int, int] | None = None
        for place in np.argsort(bounds, kind="stable"):
            if bounds[place] >= worst:
                break
            a, d = counts[place]
            pairs = self._frontier(a)
            b, k = np.array(pairs).T
            seconds = self.problem.value(time.a[a] + time.d[d] + time.b[b] + time.k[k])
            i = int(seconds.argmin())
            if seconds[i] < worst:
                worst, found = float(seconds[i]), (a, int(b[i]), d, int(k[i]))
        return (worst, self.choice(*found)) if found else None

    def _frontier(self, a: int) -> list[tuple[int, int]]:
        """Return (largest b, k) for every k that fits."""
        room = self.gpu - self.memory.a[a]
        b, most = 0, len(self.order) - a
        if self.problem.mode == GPU_ONLY:
            most = 0
        while b < most:  # binary search: the most resident chunks if no layer is kept
            middle = (b + most + 1) // 2
            b, most = (middle, most) if (self.memory.b[middle] <= room).all() else (b, middle - 1)
        pairs = []
        for k, kept in enumerate(self.memory.k):
            left = room - kept
            while b >= 0 and (self.memory.b[b] > left).any():
                b -= 1
            if b < 0:
                break
            pairs.append((b, k))
        return pairs

    def least(self, what: str) -> tuple[float, Choice] | None:
        """Return the least peak bytes of any member on the ``gpu`` or the ``host``, and the placement for it."""
        found: tuple[float, Choice] | None = None
        for a, least, most in self.counts():
            if what == "gpu":
                value, d = float(self.memory.a[a].max()), least
            elif (self.memory.a[a] <= self.gpu).all():
                value, d = float(self.offloaded.a[a, 0] + self.offloaded.d[most, 0]), most
            else:
                continue
            if found is None or value < found[0]:
                found = (value, self.choice(a, 0, d, 0))
        return found
