"""Comparison of an estimate with a machine, and changes to a spec that make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshfold.mesh import MeshfoldError, ParallelSpec
from meshfold.mesh.spec import ZeroSpec, format_bytes
from meshfold.planner.estimates import Estimate
from meshfold.planner.machines import Machine

Again = Callable[[ParallelSpec, str | None, int], Estimate]
"""Estimates the same model under another spec, another ``recompute`` and another number of micro-steps."""

_MOST = 6  # changes to try; each takes as long as the plan itself


def fits(found: Estimate, machine: Machine) -> bool:
    """Return True if a rank's state and activations fit in its device's memory; under ``zero`` the plan decides."""
    if found.spec.zero is not None:
        return not found.refusal
    return found.memory.total <= machine.memory


def explain_misfit(found: Estimate, machine: Machine) -> str:
    """Return a sentence that says what does not fit; empty if all fits."""
    if fits(found, machine):
        return ""
    return found.refusal or (
        f"a rank holds {format_bytes(found.memory.total)}, and a device of {machine.name} has {format_bytes(machine.memory)}"
    )


def suggest_change(
    found: Estimate, machine: Machine, recompute: str | None, rows: int, again: Again, *, accumulate: int = 1
) -> str:
    """Return a sentence with the first change that makes it fit, or one that says that none of those tried does.

    Args:
        found: the estimate that does not fit.
        machine: to train on.
        recompute: as requested.
        rows: sequences of a micro-step on a data rank, which micro-batches divide.
        again: estimates under a change.
        accumulate: micro-steps of a step, as requested.
    """

    def helps(spec: ParallelSpec, blocks: str | None, micro_steps: int) -> bool | None:
        """Return True if it fits with the change; None if the engine refuses the change."""
        try:
            return fits(again(spec, blocks, micro_steps), machine)
        except MeshfoldError:
            return None

    tried = []
    for words, spec, blocks in _changes(found, recompute, rows):
        found_to_fit = helps(spec, blocks, accumulate)
        if found_to_fit:
            return f"With {words} it fits"
        tried += [words] * (found_to_fit is False)
        if len(tried) == _MOST:
            break
    splits = [] if found.pipeline is not None else [2**power for power in range(1, 12) if rows % 2**power == 0]
    blocks, also = recompute or "blocks", "" if recompute else " and --recompute blocks"
    if splits:  # the fewest tokens at once first: if they are too many, so are all others
        fitting = helps(found.spec, blocks, accumulate * splits[-1])
        if fitting:
            least = next(n for n in splits if n == splits[-1] or helps(found.spec, blocks, accumulate * n))
            return f"With --accumulate {accumulate * least}{also} it fits"
        tried += [f"--accumulate {accumulate * splits[-1]}{also}"] * (fitting is False)
    beside = f" (not enough: {'; '.join(tried)})" if tried else ""
    return f"Split it over more ranks, take fewer tokens at once, or give it a larger device{beside}"


def _changes(found: Estimate, recompute: str | None, rows: int) -> Iterator[tuple[str, ParallelSpec, str | None]]:
    """Yield possible changes, cheapest first."""
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
        sharded = replace(spec, zero=ZeroSpec.parse(dict(stage=3)))
        yield "zero=dict(stage=3)", sharded, recompute
        if recompute is None:
            yield "zero=dict(stage=3) and --recompute blocks", sharded, "blocks"
