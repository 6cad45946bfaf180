"""The recorder: calls and bytes passed to torch.distributed.

>>> with record() as log:                              # doctest: +SKIP
...     loss = model(batch)
...     log.phase = "backward"
...     loss.backward()
>>> print(log)                                         # doctest: +SKIP

Bytes are counted from the tensors of each call and never from a plan, so that a plan can be checked against them.
Inside a compiled graph a call is recorded when it is traced, not each time it runs.

Bytes are those that one rank sends by the ring algorithm, the unit of every table, plan and record in Meshfold. With ``g`` ranks
and a block of ``B`` bytes:

=============== ===================== =====================================
kind            bytes a rank moves    the block
=============== ===================== =====================================
all_gather      (g−1)/g · B           the gathered tensor
reduce_scatter  (g−1)/g · B           the tensor before it is scattered
all_reduce      2 (g−1)/g · B         the tensor
all_to_all      (g−1)/g · B           the local tensor
exchange_rows   B                     the rows for other ranks
broadcast       B                     the tensor
shift           B                     the local tensor, sent to a neighbour
send            B                     the tensor; noted by the sender alone
=============== ===================== =====================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective.

    Attributes:
        kind: of collective.
        axes: the mesh axes it ran over.
        group_size: ranks that took part.
        block_bytes: bytes of the block (see :mod:`meshfold.mesh.recording.comm_log`).
        phase: the log's phase when it was issued.
        of_weights: it sums a weight's gradient, which no product of the backward waits for.
    """

    kind: Kind
    axes: tuple[str, ...]
    group_size: int
    block_bytes: int
    phase: str
    of_weights: bool = False

    @property
    def bytes(self) -> Fraction:
        """Bytes this rank sent."""
        return moved_bytes(self.kind, self.block_bytes, self.group_size)


@dataclass(eq=False)  # compare by identity: two empty logs are different
class Log:
    """The collectives of one recording, in the order they were issued.

    Attributes:
        entries: the collectives.
        phase: of those that come next.
        on_meta: it records the collectives of a :class:`.MetaMesh`, which sends nothing, and no others.
    """

    entries: list[Entry] = field(default_factory=list)
    phase: str = "forward"
    on_meta: bool = False

    @property
    def bytes(self) -> Fraction:
        """Bytes this rank sent in all."""
        return sum((entry.bytes for entry in self.entries), Fraction(0))

    def count(self, phase: str | None = None) -> Counter[tuple[Kind, tuple[str, ...], Fraction]]:
        """Count how often each (kind, axes, bytes) was issued, in a phase or in all."""
        chosen = (entry for entry in self.entries if phase is None or entry.phase == phase)
        return Counter((entry.kind, entry.axes, entry.bytes) for entry in chosen)

    def bytes_by(self, *fields: str) -> dict[tuple[object, ...], Fraction]:
        """Return bytes summed by the fields named, such as ``bytes_by("kind", "axes")``."""
        total: dict[tuple[object, ...], Fraction] = {}
        for entry in self.entries:
            key = tuple(getattr(entry, name) for name in fields)
            total[key] = total.get(key, Fraction(0)) + entry.bytes
        return total

    def __str__(self) -> str:
        lines = [f"{'phase':<10}{'collective':<16}{'axes':<20}{'ranks':>6}{'calls':>7}{'bytes a rank sends':>20}"]
        seen: dict[tuple[str, Kind, tuple[str, ...], int], list[Fraction]] = {}
        for entry in self.entries:
            seen.setdefault((entry.phase, entry.kind, entry.axes, entry.group_size), []).append(entry.bytes)
        for (phase, kind, axes, size), sent in seen.items():
            lines.append(f"{phase:<10}{kind:<16}{','.join(axes):<20}{size:>6}{len(sent):>7}{float(sum(sent)):>20,.0f}")
        return "\n".join(lines)


_active: list[Log] = []


@contextmanager
def record(*, on_meta: bool = False) -> Iterator[Log]:
    """Record every collective that this process issues inside the block. Recordings may nest.

    ``on_meta``: record those of a :class:`.MetaMesh` instead, which are counted and never sent.
    """
    log = Log(on_meta=on_meta)
    _active.append(log)
    try:
        yield log
    finally:
        _active.remove(log)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context manager: the collectives inside serve the library itself and are in no recording."""
    logs, _active[:] = _active[:], []
    try:
        yield
    finally:
        _active[:] = logs


@contextmanager
def recorded_times(number: int) -> Iterator[None]:
    """Context manager: what is issued inside is in the active recordings ``number`` times, as if a loop issued it."""
    before = [(log, len(log.entries)) for log in _active]
    yield
    for log, first in before:
        log.entries += log.entries[first:] * (number - 1)


_of_weights: list[bool] = []


@contextmanager
def weight_gradients() -> Iterator[None]:
    """Context manager: the collectives inside sum gradients of weights (:attr:`Entry.of_weights`)."""
    _of_weights.append(True)
    try:
        yield
    finally:
        _of_weights.pop()


def note(kind: Kind, axes: tuple[str, ...], group_size: int, block_bytes: int, *, on_meta: bool = False) -> None:
    """Report a collective to the active recordings; called only by :mod:`meshfold.mesh.collectives.operations`.

    ``on_meta``: it belongs to a :class:`.MetaMesh`.
    """
    for log in _active:
        if log.on_meta is on_meta:
            log.entries.append(Entry(kind, axes, group_size, block_bytes, log.phase, bool(_of_weights)))


Kind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange_rows", "broadcast", "shift", "send"
]
KINDS: tuple[Kind, ...] = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "exchange_rows",
    "broadcast",
    "shift",
    "send",
)


def moved_bytes(kind: Kind, block_bytes: int | Fraction, group_size: int) -> Fraction:
    """Return bytes one rank sends in a collective; exact, so that plans and records can be compared with ``==``.

    Args:
        kind: one of :data:`KINDS`.
        block_bytes: the size of the block that the table above names, in bytes.
        group_size: the number of ranks that take part.
    """
    if group_size == 1:
        return Fraction(0)
    if kind in ("exchange_rows", "broadcast", "shift", "send"):
        return Fraction(block_bytes)
    share = Fraction(group_size - 1, group_size) * block_bytes
    return 2 * share if kind == "all_reduce" else share
