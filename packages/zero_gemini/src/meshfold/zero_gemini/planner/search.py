"""The joint search: state of some chunks, parameters of some, activations of some layers, and how to clip.

Up to ``EXACT_CHUNKS`` chunks the best choice is proved (exact.py); beyond it is the best of an ordered family (family.py).
Which of the two is used depends on the workload alone and both are exact minima over sets that do not depend on the
limits: with more memory a plan is never slower.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfold.zero_gemini.planner.exact import as_choice, branch_and_bound, every_choice
from meshfold.zero_gemini.planner.family import Family, layer_order, orders
from meshfold.zero_gemini.planner.options import ALL_GPU, Choice
from meshfold.zero_gemini.planner.problem import Case, Problem

EXACT_CHUNKS, EXACT_LAYERS = 10, 24
MOST_SWAPS = 64
"""so many swaps are tried to bring the earliest chunks to the GPU where that costs nothing"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Best:
    """The best choice, the problem it solves, its seconds, and whether nothing better exists."""

    problem: Problem
    choice: Choice
    seconds: float
    proved: bool


def small(case: Case) -> bool:
    """Return whether the best choice is searched for and proved."""
    return len(case.workload.chunks) <= EXACT_CHUNKS and len(case.workload.layers) <= EXACT_LAYERS


def search(case: Case) -> Best | None:
    """The fastest choice within the limits, None if nothing fits."""
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
    return _earliest_first(case, best) if best else None


def least_bytes(case: Case, what: str) -> int | None:
    """The least GPU (``what="gpu"``) or host bytes with which a plan exists, the other limits as they are; None if none do."""
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
    """The same as :func:`search` by looking at every choice: the oracle of the tests, for about ten chunks."""
    best: Best | None = None
    for problem in case.problems():
        for values, picks in every_choice(problem):
            i = int(values.argmin())
            if best is None or values[i] < best.seconds:
                choice = as_choice(problem, picks[i])
                best = Best(problem=problem, choice=choice, seconds=float(values[i]), proved=True)
    return best


def _earliest_first(case: Case, best: Best) -> Best:
    """Among equals, the earliest chunks on the GPU: swaps with later chunks of the same size that cost nothing."""
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
