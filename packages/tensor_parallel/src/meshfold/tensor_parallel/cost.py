"""The cost of a plan: collectives with their bytes, comparable to the recorder's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from meshfold.mesh import Mesh, moved_bytes
from meshfold.mesh.recording import Kind
from meshfold.tensor_parallel.plan import Phase


@dataclass(frozen=True, slots=True)
class CostEntry:
    """One collective of a plan with its size.

    Attributes:
        phase: forward, dx or dw.
        kind: the collective.
        operand: the tensor that is sent.
        axes: mesh axes, in mesh order, without axes of size 1.
        group_size: ranks that take part.
        block_bytes: bytes of the block (see :mod:`meshfold.mesh.recording.comm_log`).
    """

    phase: str
    kind: Kind
    operand: str
    axes: tuple[str, ...]
    group_size: int
    block_bytes: int

    @property
    def bytes(self) -> Fraction:
        """Bytes a rank sends."""
        return moved_bytes(self.kind, self.block_bytes, self.group_size)


@dataclass(frozen=True, slots=True)
class Cost:
    """Collectives of a plan with their bytes, as each rank sees them."""

    entries: tuple[CostEntry, ...]

    @property
    def bytes(self) -> Fraction:
        """Bytes a rank sends in all."""
        return sum((entry.bytes for entry in self.entries), Fraction(0))

    def count(self, *phases: str) -> Counter[tuple[Kind, tuple[str, ...], Fraction]]:
        """Return the number of calls by (kind, axes, bytes), in some phases or in all; comparable to ``Log.count``."""
        chosen = (entry for entry in self.entries if not phases or entry.phase in phases)
        return Counter((entry.kind, entry.axes, entry.bytes) for entry in chosen)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.entries + other.entries)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.entries * times)

    def __str__(self) -> str:
        lines = [f"{'phase':<9}{'collective':<16}{'of':<4}{'axes':<16}{'ranks':>6}{'bytes a rank sends':>20}"]
        lines += [
            f"{e.phase:<9}{e.kind:<16}{e.operand:<4}{','.join(e.axes):<16}{e.group_size:>6}{float(e.bytes):>20,.0f}"
            for e in self.entries
        ]
        return "\n".join([*lines, f"{'total':<51}{float(self.bytes):>20,.0f}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CostQuery:
    """The sizes at which a plan's cost is asked for.

    Attributes:
        sizes: elements of m, k and n, over all ranks of the axes that the layouts name.
        mesh: gives the sizes of the axes.
        itemsize: bytes an element.
        phases: which of the three products are computed.
        keep: gathered operands that forward keeps for backward.
    """

    sizes: Mapping[str, int]
    mesh: Mesh
    itemsize: int
    phases: tuple[Phase, ...]
    keep: frozenset[str]


class CostBuilder:
    """Collector of entries; collectives over one rank cost nothing and are left out."""

    def __init__(self, mesh: Mesh, itemsize: int) -> None:
        self._mesh, self._itemsize = mesh, itemsize
        self._entries: list[CostEntry] = []

    def add(self, phase: str, kind: Kind, operand: str, axes: Iterable[str], elements: int) -> None:
        """Add a collective; ``elements``: of its block."""
        spanned = self._mesh.spanned(*axes)
        size = self._mesh.size(*spanned)
        if size > 1:
            self._entries.append(CostEntry(phase, kind, operand, spanned, size, elements * self._itemsize))

    def gather(self, phase: str, operand: str, axes: Iterable[str], elements: int) -> int:
        """Add all-gathers over axes in sequence, of a block with ``elements`` elements; return the gathered elements."""
        for axis in axes:
            elements *= self._mesh.size(axis)
            self.add(phase, "all_gather", operand, (axis,), elements)
        return elements

    def scatter(self, phase: str, operand: str, axes: Iterable[str], elements: int) -> int:
        """Add reduce-scatters over axes in sequence; return the elements left."""
        for axis in axes:
            self.add(phase, "reduce_scatter", operand, (axis,), elements)
            elements //= self._mesh.size(axis)
        return elements

    def done(self) -> Cost:
        """Return the collected cost."""
        return Cost(tuple(self._entries))
