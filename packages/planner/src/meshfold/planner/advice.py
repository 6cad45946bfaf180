"""Changes that make a plan fit which does not: each is tried before it is told, and one that was made already is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshfold.mesh import MeshfoldError, ParallelSpec
from meshfold.mesh.spec import format_bytes
from meshfold.planner.estimates import Estimate
from meshfold.planner.machines import Machine

Again = Callable[[ParallelSpec, str | None], Estimate]
"""Estimates the same model under another spec and another ``recompute``."""

_MOST = 6  # changes that are tried: each takes as long as the plan itself


def fits(found: Estimate, machine: Machine) -> bool:
    """Tell whether a rank's state and activations are in its device's memory; under ``zero`` the plan has decided it."""
    if found.spec.zero is not None:
        return not found.refusal
    return found.memory.total <= machine.memory


def explain_misfit(found: Estimate, machine: Machine) -> str:
    """Return what is too large, in a sentence; empty if all fits."""
    if fits(found, machine):
        return ""
    return found.refusal or (
        f"a rank holds {format_bytes(found.memory.total)}, and a device of {machine.name} has {format_bytes(machine.memory)}"
    )


def suggest_change(found: Estimate, machine: Machine, recompute: str | None, rows: int, again: Again) -> str:
    """Return the first change that makes it fit, or that none of those tried does.

    Args:
        found: what does not fit.
        machine: where.
        recompute: as it was asked for.
        rows: sequences of a micro-step on a data rank, which micro-batches divide.
        again: estimates under a change.
    """
    tried = []
    for words, spec, blocks in _changes(found, recompute, rows):
        try:
            changed = again(spec, blocks)
        except MeshfoldError:
            continue
        if fits(changed, machine):
            return f"With {words} it fits"
        tried.append(words)
        if len(tried) == _MOST:
            break
    beside = f" ({', '.join(tried)} would not do)" if tried else ""
    return f"Split it over more ranks, take fewer tokens at once, or give it a larger device{beside}"


def _changes(
    found: Estimate, recompute: str | None, rows: int
) -> Iterator[tuple[str, ParallelSpec, str | None]]:
    """Yield what could be written, the cheapest first."""
    spec = found.spec
    finer: list[tuple[str, ParallelSpec]] = []
    if found.pipeline is not None and spec.pipeline is not None:
        now = found.pipeline.simulation.schedule.microbatches
        for count in (now * 2**power for power in range(1, 12)):
            if count <= rows and rows % count == 0:
                changed = replace(spec, pipeline=replace(spec.pipeline, microbatches=count))
                finer.append((f"pipeline.microbatches={count}", changed))
    for words, changed in finer:
        yield words, changed, recompute
    if recompute is None:
        yield "recompute='blocks' (--recompute blocks)", spec, "blocks"
        for words, changed in finer:
            yield f"{words} and --recompute blocks", changed, "blocks"
    if spec.zero is None and found.pipeline is None:
        from meshfold.mesh.spec import ZeroSpec

        yield "zero=dict(stage=3)", replace(spec, zero=ZeroSpec.parse(dict(stage=3))), recompute
