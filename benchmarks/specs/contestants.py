"""The rows of the table, and what builds each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.specs.ours import SPECS, Ours
from benchmarks.specs.work import Work

if TYPE_CHECKING:
    from benchmarks.specs.worker import Trainer

PEERS: dict[str, dict[str, Any]] = {
    "FSDP2": dict(compiled=False, reshard=True),
    "FSDP2 compiled": dict(compiled=True, reshard=True),
    "FSDP2 compiled, kept whole": dict(compiled=True, reshard=False),
}
"""``kept whole``: parameters are gathered once a step (``reshard_after_forward=False``)"""


def names(ranks: int) -> list[str]:
    """All contestants on so many ranks."""
    ours = list(SPECS[ranks])
    return [*ours, *(f"{name} compiled" for name in ours), *PEERS]


def builder(name: str, ranks: int) -> Callable[[Work], Trainer]:
    """What makes a contestant on every rank."""
    if name in PEERS:

        def peer(work: Work) -> Trainer:
            from benchmarks.peers.fsdp2 import FSDP2

            return FSDP2(work, **PEERS[name])

        return peer
    spec = SPECS[ranks][name.removesuffix(" compiled")]
    return lambda work: Ours(work, spec, compiled=name.endswith(" compiled"))
