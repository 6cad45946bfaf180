"""Hanayo on a clock: idle time by ranks and waves, beside 1F1B and interleaved; and what messages do to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshfold.pipeline import Simulation, schedule, simulate

RANKS = (2, 4, 8, 16, 32)
WAVES = (1, 2, 4)
SENDS = (0.0, 0.02, 0.05, 0.1, 0.2)  # in TF of a rank's whole share for one micro-batch
SENT_RANKS = 8


def everything(ranks: Iterable[int] = RANKS) -> dict[str, Any]:
    """All numbers, for as many micro-batches as ranks."""
    return {
        "free messages": [row(p, 0.0) for p in ranks],
        "messages": [row(SENT_RANKS, send) for send in SENDS],
    }


def row(ranks: int, send: float) -> dict[str, Any]:
    """Idle shares, and activations in those of a rank's share for one micro-batch."""
    waves = {w: hanayo(ranks, w, send) for w in WAVES}
    others = {
        "1F1B": on_clock("1f1b", ranks, 1, send),
        "interleaved, 2 chunks": on_clock("interleaved", ranks, 2, send, chunks=2),
    }
    return {
        "P": ranks,
        "send": send,
        "hanayo": {str(w): run.bubble for w, run in waves.items()},
        "others": {name: run.bubble for name, run in others.items()},
        "activations": {str(w): max(run.peak) for w, run in waves.items()},
    }


def hanayo(ranks: int, waves: int, send: float) -> Simulation:
    """Its waves, with 2 W stages a rank."""
    return on_clock("hanayo", ranks, 2 * waves, send, waves=waves)


def on_clock(
    name: str, ranks: int, stages: int, send: float, *, chunks: int | None = None, waves: int | None = None
) -> Simulation:
    """A schedule with TF = 1 and TB + TW = 2 for a rank's share of the model, in so many stages."""
    made = schedule(name, ranks=ranks, microbatches=ranks, chunks=chunks, waves=waves)
    time = 1 / stages
    return simulate(made, time, time, time, send, activation=time)
