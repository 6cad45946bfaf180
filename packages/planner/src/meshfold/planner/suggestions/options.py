"""Results of a search: planned options, and specs that were left out, with reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshfold.planner.estimates import Estimate, StepSpeed, step_speed
from meshfold.planner.fitting import explain_misfit, fits
from meshfold.planner.machines import Machine
from meshfold.planner.planner import estimate
from meshfold.planner.report import format_seconds
from meshfold.planner.suggestions.layouts import Candidate, Family
from meshfold.planner.suggestions.outlook import Outlook


@dataclass(frozen=True, kw_only=True)
class Option:
    """A candidate with a full plan.

    Attributes:
        candidate: the spec and its settings.
        found: its plan.
        speed: of the plan, as for any spec.
        outlook: expected before the plan was made.
        misfit: why it does not fit; empty if it does.
    """

    candidate: Candidate
    found: Estimate
    speed: StepSpeed
    outlook: Outlook
    misfit: str

    @property
    def bytes(self) -> int:
        """Bytes that the fullest rank holds."""
        pipeline = self.found.pipeline
        return self.found.memory.total if pipeline is None else max(memory.total for memory in pipeline.memory)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A family that lost without a plan.

    Attributes:
        family: the ranks.
        seconds: about the seconds of its best step; a lower bound if ``outlook`` is None.
        candidate: its best one; None if none was looked at.
        outlook: of this candidate.
        why: what takes longer, or the engine's refusal.
    """

    family: Family
    seconds: float
    candidate: Candidate | None
    outlook: Outlook | None
    why: str


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Specs for a model on a machine, fastest first.

    Attributes:
        options: those that fit, with whole plans, fastest first.
        misfits: those with whole plans that do not fit.
        rejected: other families, fastest first.
        ranks: world size.
        machine: for which.
        batch_size: sequences of a global batch.
        seq_len: tokens of a sequence.
        precision: of compute.
        considered: specs that were compared.
        traces: micro-steps that were traced.
        plans: whole plans that were made.
        seconds: duration of the search.
    """

    options: tuple[Option, ...]
    misfits: tuple[Option, ...]
    rejected: tuple[Rejected, ...]
    ranks: int
    machine: Machine
    batch_size: int
    seq_len: int
    precision: str
    considered: int
    traces: int
    plans: int
    seconds: float

    @property
    def best(self) -> Option:
        """The first option."""
        return self.options[0]


def plan_of(
    candidate: Candidate,
    build: Callable[[], nn.Module],
    machine: Machine,
    *,
    batch_size: int,
    seq_len: int,
    precision: str,
    **settings: Any,
) -> Estimate:
    """Return the full plan of a candidate."""
    return estimate(
        build,
        candidate.spec,
        batch_size=batch_size,
        seq_len=seq_len,
        precision=precision,
        accumulate=candidate.accumulate,
        recompute=candidate.recompute,
        machine=machine,
        **settings,
    )


def option_of(candidate: Candidate, found: Estimate, outlook: Outlook, machine: Machine, precision: str) -> Option:
    """Return a planned candidate."""
    return Option(
        candidate=candidate,
        found=found,
        speed=step_speed(found, machine, precision),
        outlook=outlook,
        misfit="" if fits(found, machine) else explain_misfit(found, machine),
    )


def what_costs(outlook: Outlook, best: Outlook) -> str:
    """Return what takes longer than in the best option: ``0.21 s more of messages that the next operator waits for``."""
    mine, theirs = outlook.costs(), best.costs()
    more = {what: seconds - theirs.get(what, 0.0) for what, seconds in mine.items()}
    most = max(more, key=lambda what: more[what])
    if more[most] <= 0.01 * best.seconds:
        return "about as fast"
    return f"{format_seconds(more[most])} more of {most}"
