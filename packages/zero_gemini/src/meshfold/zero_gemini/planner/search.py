"""Search for the best plan: state of some chunks, parameters of some, activations of some layers, and how to clip.

Up to ``EXACT_CHUNKS`` chunks the best choice is proved; beyond it is the best of an ordered family (family.py). Only the workload
decides which of the two is used. Both are exact minima over sets that do not depend on the limits, so more memory never makes a
plan slower.

The proof is branch and bound over blocks of partial choices. A partial choice is dropped when it no longer fits in memory, or when
no completion can be faster than the best plan known. Two lower bounds are used: every row plus the least that the rest adds, and
Lagrangian bounds, which put a price on memory (Fisher, 1981). For weights y of the rows of every phase and prices μ >= 0 of memory,

    seconds >= Σ y·time(x) + Σ μ·(memory(x) - limit),   a sum over chunks and layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from meshfold.zero_gemini.planner.family import Family, layer_order, orders
from meshfold.zero_gemini.planner.options import ALL_GPU, Choice, Floats, Ints
from meshfold.zero_gemini.planner.problem import Case, Problem

BLOCK = 1024
"""Number of partial choices that are examined together."""
ITERATIONS = 120
"""Steps towards the best prices."""
_MOST_LOOKED_AT = 400_000
"""Partial choices after which the search ends without a proof."""
ROUNDS, CLIMB = 2, 12
"""Rounds, and steps a round, in which prices are improved for every block."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The best choice, if it is better than the known one; ``proved`` unless the search was cut short."""

    value: float
    choice: Choice | None
    proved: bool
    looked_at: int


class _Items:
    """Chunks and layers as items; each option of an item adds to sums of time and memory. Shape of one: (option, row).

    A layer and its attention are one item of three options: nothing is kept, the results of attention, or all.
    """

    def __init__(self, problem: Problem) -> None:
        options = list(problem.options)
        self.chunks, self.layers = len(problem.time.chunk), len(problem.time.layer)
        table = problem.memory
        most = table.base + table.chunk[:, options].max(1).sum(0) + table.layer.max(1).sum(0)
        rows = np.isfinite(problem.limits) & (most > problem.limits)  # the other limits always hold
        self.limits = problem.limits[rows]
        self.time_base, self.memory_base = problem.time.base, table.base[rows]
        self.time = [*problem.time.chunk[:, options], *self._of_layers(problem.time.layer, problem.attention)]
        self.memory = [
            *table.chunk[:, options][..., rows],
            *self._of_layers(table.layer[..., rows], problem.attention),
        ]

    def choice(self, picks: Ints, problem: Problem) -> Choice:
        options = np.array(problem.options)
        chunks = options[picks[: self.chunks]]
        layers = np.zeros(self.layers, dtype=np.int64)
        for place, pick in zip(_alone(self.layers, problem.attention), picks[self.chunks :].tolist(), strict=True):
            attention = problem.attention.get(place)
            layers[place] = pick if attention is None else pick == 2
            if attention is not None:
                layers[attention] = pick > 0
        return Choice(chunks=chunks, layers=layers)

    def _of_layers(self, found: Floats, attention: Mapping[int, int]) -> Iterator[Floats]:
        """Yield the options of each layer that is no other one's attention."""
        for place in _alone(self.layers, attention):
            of = attention.get(place)
            rest = found[place]
            yield (
                rest
                if of is None
                else np.stack([rest[0] + found[of][0], rest[0] + found[of][1], rest[1] + found[of][1]])
            )


def _alone(layers: int, attention: Mapping[int, int]) -> list[int]:
    """Return the places of layers that are no other one's attention."""
    others = set(attention.values())
    return [place for place in range(layers) if place not in others]


def branch_and_bound(problem: Problem, worst: float) -> Found:
    """Return the best choice of a problem, if it is better than ``worst``.

    Args:
        worst: seconds of the best choice known; only better ones are searched. inf if none is known.
    """
    items = _Items(problem)
    count = len(items.time)
    rows, limited = len(items.time_base), len(items.limits)
    everything = _Prices(problem, items, range(count))
    everything.climb(items.time_base, items.memory_base, worst, ITERATIONS)
    tight = np.maximum(items.limits, 1.0)  # decide the largest items first, to prune early
    order = sorted(range(count), key=lambda i: -float(np.ptp(items.memory[i] / tight, axis=0).sum()))
    rest = [_Prices(problem, items, order[level:], like=everything) for level in range(count)]
    least = np.zeros((count + 1, rows + limited))
    adds = [np.concatenate([t, m], axis=-1) for t, m in zip(items.time, items.memory, strict=True)]
    for level in reversed(range(count)):
        least[level] = least[level + 1] + adds[order[level]].min(0)
    start = np.concatenate([items.time_base, items.memory_base])
    blocks = [(0, start[None], np.zeros((1, count), dtype=np.int64))]
    best: Choice | None = None
    looked_at = 0
    while blocks:
        level, sums, picks = blocks.pop()
        bounds = problem.value((sums + least[level])[:, :rows])
        prices = rest[level]
        for _ in range(ROUNDS):
            keep = np.maximum(bounds, prices.bound(sums)) < worst * (1 - 1e-12)
            sums, picks, bounds = sums[keep], picks[keep], bounds[keep]
            if not len(sums):
                break
            middle = sums.mean(0)
            prices.climb(middle[:rows], middle[rows:], worst, CLIMB)
        if not len(sums):
            continue
        add = adds[order[level]]
        looked_at += len(sums) * len(add)
        if looked_at > _MOST_LOOKED_AT:
            return Found(value=worst, choice=best, proved=False, looked_at=looked_at)
        sums = (sums[:, None] + add[None]).reshape(-1, sums.shape[1])
        picks = np.repeat(picks, len(add), axis=0)
        picks[:, order[level]] = np.tile(np.arange(len(add)), len(picks) // len(add))
        ends = sums + least[level + 1]
        fits = (ends[:, rows:] <= items.limits).all(1)
        bounds = np.where(fits, problem.value(ends[:, :rows]), np.inf)
        if level + 1 == count:
            i = int(bounds.argmin())
            if bounds[i] < worst:
                worst, best = float(bounds[i]), items.choice(picks[i], problem)
            continue
        bounds = np.maximum(bounds, rest[level + 1].bound(sums))
        good = np.argsort(bounds, kind="stable")[: int((bounds < worst * (1 - 1e-12)).sum())]
        parts = [good[i : i + BLOCK] for i in range(0, len(good), BLOCK)]
        blocks += [(level + 1, sums[part], picks[part]) for part in reversed(parts)]
    return Found(value=worst, choice=best, proved=True, looked_at=looked_at)


class _Prices:
    """Lagrange multipliers of time and memory rows for the open items, and the bound they give.

    Subgradient ascent with Polyak's step, the weights of a phase projected to their simplex.
    """

    def __init__(self, problem: Problem, items: _Items, open_items: Sequence[int], like: _Prices | None = None) -> None:
        self.phases, self.limits, self.value = problem.phases, items.limits, problem.value
        padded = max(len(items.time[i]) for i in open_items)
        self.scale = 1 / np.maximum(items.limits, 1.0)
        self.time = np.stack([_padded(items.time[i], padded) for i in open_items])
        self.memory = np.stack([_padded(items.memory[i], padded) for i in open_items]) * self.scale
        self.index = np.arange(len(open_items))
        self.weights, self.prices = np.zeros(len(items.time_base)), np.zeros(len(items.limits))
        for phase in problem.phases:
            self.weights[phase.start : phase.stop] = phase.weight / (phase.stop - phase.start)
        if like is not None:
            self.weights, self.prices = like.weights, like.prices

    def priced(self) -> Floats:
        """Return the cost of every option of every open item, (item, option)."""
        cost: Floats = self.time @ self.weights + self.memory @ self.prices
        return cost

    def bound(self, sums: Floats) -> Floats:
        """Return a lower bound on the time of any completion of the partial sums of time and memory."""
        rows = len(self.weights)
        memory = (sums[:, rows:] - self.limits) * self.scale
        total: Floats = sums[:, :rows] @ self.weights + memory @ self.prices + self.priced().min(1).sum()
        return total

    def climb(self, time: Floats, memory: Floats, worst: float, steps: int) -> None:
        """Improve the prices for partial sums."""
        over = (memory - self.limits) * self.scale
        weights, prices = self.weights, self.prices
        top, stride = -np.inf, 1.0
        for _ in range(steps):
            picks = (self.time @ weights + self.memory @ prices).argmin(1)
            up = time + self.time[self.index, picks].sum(0)
            use = over + self.memory[self.index, picks].sum(0)
            value = float(weights @ up + prices @ use)
            if value > top:
                top, self.weights, self.prices = value, weights, prices
            else:
                stride *= 0.93
            target = worst if np.isfinite(worst) else 1.2 * float(self.value(up)) + 1e-9
            if value >= target:
                return
            unit = max(target, 1e-30) ** 2  # memory is a fraction of its limit, time in seconds
            length = stride * (target - value) / max(float(use @ use) * unit + float(up @ up), 1e-300)
            weights = weights + length * up
            for phase in self.phases:
                part = slice(phase.start, phase.stop)
                weights[part] = _simplex(weights[part], phase.weight)
            prices = np.maximum(0, prices + length * unit * use)


def _padded(options: Floats, count: int) -> Floats:
    """Repeat the last option up to ``count`` options."""
    return np.concatenate([options, options[-1:].repeat(count - len(options), 0)])


def _simplex(x: Floats, total: float) -> Floats:
    """Return the nearest point of ``x >= 0, Σ x = total``."""
    ordered = np.sort(x)[::-1]
    excess = np.cumsum(ordered) - total
    last = np.nonzero(ordered - excess / np.arange(1, len(x) + 1) > 0)[0]
    shift = excess[last[-1]] / (last[-1] + 1) if len(last) else excess[-1] / len(x)
    out: Floats = np.maximum(x - shift, 0)
    return out


def every_choice(problem: Problem) -> Iterator[tuple[Floats, Ints]]:
    """Yield every choice that fits and its value, in blocks and without bounds: (values, picks), for few chunks."""
    items = _Items(problem)
    split = max(0, len(items.time) - 7)  # the last seven are enumerated at once
    tail = np.array(list(product(*[range(len(option)) for option in items.time[split:]])))
    time = sum((items.time[split + i][tail[:, i]] for i in range(tail.shape[1])), start=items.time_base)
    memory = sum((items.memory[split + i][tail[:, i]] for i in range(tail.shape[1])), start=items.memory_base)
    for head in product(*[range(len(option)) for option in items.time[:split]]):
        used = sum((items.memory[i][pick] for i, pick in enumerate(head)), start=np.zeros(len(items.limits)))
        fits = (memory + used <= items.limits).all(1)
        if fits.any():
            spent = sum((items.time[i][pick] for i, pick in enumerate(head)), start=np.zeros(len(items.time_base)))
            picks = np.concatenate([np.tile(np.array(head, dtype=np.int64), (int(fits.sum()), 1)), tail[fits]], axis=1)
            yield problem.value(time[fits] + spent), picks.astype(np.int64)


def as_choice(problem: Problem, picks: Ints) -> Choice:
    """Return the choice of a row of picks."""
    return _Items(problem).choice(picks, problem)


EXACT_CHUNKS, EXACT_LAYERS = 10, 24
MOST_SWAPS = 64
"""number of swaps tried to bring the earliest chunks to the GPU where that costs nothing"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Best:
    """The best choice, the problem it solves, its seconds, and whether nothing better exists."""

    problem: Problem
    choice: Choice
    seconds: float
    proved: bool


def small(case: Case) -> bool:
    """Return True if the best choice is searched for and proved."""
    layers = len(case.workload.layers) - len(case.workload.attention_of())
    return len(case.workload.chunks) <= EXACT_CHUNKS and layers <= EXACT_LAYERS


def search(case: Case) -> Best | None:
    """Return the fastest choice within the limits, None if nothing fits."""
    layers = layer_order(case.workload)
    best: Best | None = None
    worst = np.inf
    problems = list(case.problems()) if small(case) else []
    for problem in problems or case.problems():
        for order in orders(case.workload):
            found = Family(problem, order, layers).best(worst)
            if found:
                worst = found[0]
                best = Best(problem=problem, choice=found[1], seconds=worst, proved=False)
    if small(case):
        proved = True
        for problem in problems:
            result = branch_and_bound(problem, worst)
            proved = proved and result.proved
            if result.choice is not None:
                worst = result.value
                best = Best(problem=problem, choice=result.choice, seconds=worst, proved=False)
        if best:
            best = Best(problem=best.problem, choice=best.choice, seconds=best.seconds, proved=proved)
    return _earliest_first(case, _keep_what_fits(case, best)) if best else None


def least_bytes(case: Case, what: str) -> int | None:
    """Return the smallest GPU (``what="gpu"``) or host bytes with which a plan exists, other limits unchanged; None if none do."""
    layers = layer_order(case.workload)
    worst = np.inf
    for problem in case.leanest():
        lean = problem.for_bytes(what)
        for order in orders(case.workload):
            found = Family(lean, order, layers).least(what)
            worst = min(worst, found[0]) if found else worst
        if small(case):
            worst = branch_and_bound(lean, worst).value
    return int(worst) if np.isfinite(worst) else None


def exhaustive_search(case: Case) -> Best | None:
    """Return the result of :func:`search` by trying every choice: the reference of the tests, for about ten chunks."""
    best: Best | None = None
    for problem in case.problems():
        for values, picks in every_choice(problem):
            i = int(values.argmin())
            if best is None or values[i] < best.seconds:
                choice = as_choice(problem, picks[i])
                best = Best(problem=problem, choice=choice, seconds=float(values[i]), proved=True)
    return best


def _keep_what_fits(case: Case, best: Best) -> Best:
    """Return a choice that also keeps layers for which there is room, where that is faster: a family's members keep the first ones
    in an order, and none behind one that does not fit.

    Only of a traced step, whose layers differ. A plan within a little more memory may then be slower, by less than such a layer.
    """
    problem, choice, seconds = best.problem, best.choice, best.seconds
    for layer in layer_order(case.workload).tolist() if case.workload.timestep_seconds is not None else ():
        attention = problem.attention.get(layer)
        if choice.layers[layer] or (attention is not None and not choice.layers[attention]):
            continue
        layers = choice.layers.copy()
        layers[layer] = 1
        other = Choice(chunks=choice.chunks, layers=layers)
        if problem.fits(other) and (spent := problem.seconds(other)) < seconds:
            choice, seconds = other, spent
    return Best(problem=problem, choice=choice, seconds=seconds, proved=best.proved)


def _earliest_first(case: Case, best: Best) -> Best:
    """Return a choice that is as fast with earlier chunks on the GPU: swap them with later ones of the same size."""
    problem, choice, chunks = best.problem, best.choice, case.workload.chunks
    size = [(chunk.elems, chunk.gathered_elems, chunk.trainable) for chunk in chunks]
    tries = MOST_SWAPS
    for early in range(len(chunks)):
        on_gpu = choice.chunks == ALL_GPU
        later = [i for i in range(early + 1, len(chunks)) if on_gpu[i] and size[i] == size[early]]
        if on_gpu[early] or not later or not tries:
            continue
        tries -= 1
        swapped = choice.chunks.copy()
        swapped[[early, later[-1]]] = swapped[[later[-1], early]]
        other = Choice(chunks=swapped, layers=choice.layers)
        if problem.fits(other) and problem.seconds(other) <= best.seconds:
            choice = other
    seconds = min(best.seconds, problem.seconds(choice))
    return Best(problem=problem, choice=choice, seconds=seconds, proved=best.proved)
