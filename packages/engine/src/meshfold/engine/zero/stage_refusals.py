"""Refusals of several stages of a pipeline as one: its least memory is enough for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshfold.zero_gemini import MemoryPlanError
from meshfold.zero_gemini.planner import DoesNotFit


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A stage's refusal, as it is sent to the other stages.

    Attributes:
        rank: of the pipeline.
        text: of the refusal.
        gpu: the least of a GPU's memory with a plan; None if none helps, or if it was not searched.
        host: the same of the host's memory.
        binds: ``gpu`` or ``host``; empty if neither was searched.
    """

    rank: int
    text: str
    gpu: int | None
    host: int | None
    binds: str

    @classmethod
    def of(cls, error: MemoryPlanError, rank: int) -> Refused:
        """Return a rank's error as data."""
        if isinstance(error, DoesNotFit):
            return cls(
                rank=rank,
                text=str(error),
                gpu=error.minimum_gpu_bytes,
                host=error.minimum_host_bytes,
                binds=error.binds,
            )
        return cls(rank=rank, text=str(error), gpu=None, host=None, binds="")


def refusal_of_stages(refused: Sequence[Refused]) -> MemoryPlanError:
    """Return the error for all stages: that of the stage which needs most, with the least that is enough for all.

    Args:
        refused: at least one, of any ranks that refused.
    """
    worst = max(refused, key=lambda one: float("inf") if one.gpu is None else one.gpu)
    text = f"rank {worst.rank} of the pipeline: {worst.text}"
    others = sorted({one.rank for one in refused} - {worst.rank})
    if others:
        named = f"Rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        less = "" if worst.gpu is None else f", and need{'' if len(others) > 1 else 's'} no more"
        text += f" {named} of the pipeline refused too{less}."
    if not worst.binds:
        return MemoryPlanError(text)
    hosts = [one.host for one in refused]
    return DoesNotFit(
        text,
        gpu=worst.gpu,
        host=None if None in hosts else max(host for host in hosts if host is not None),
        binds=worst.binds,
    )
