"""The entry ``expert``: over how many ranks the experts of a mixture are spread, and which ranks these are.

Experts add no ranks. Their axis is taken from the ranks of other entries: those along data, sequence and tensor, which would
otherwise hold the same experts. Dense layers keep their layout, and the remaining ranks hold copies of the experts (parallel
folding: Liu et al. 2025, arXiv 2504.14960).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshfold.mesh.errors import SpecError
from meshfold.mesh.spec.entry import Entry, divisors, join_choices

KEYS = ("size", "tensor", "exchange")
EXCHANGES = ("auto", "all_to_all", "all_gather")
"""How tokens come to their experts' ranks: only those that a rank works on, or all of them without a wait of the host."""


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """The checked entry ``expert``.

    Attributes:
        size: ranks that hold different experts.
        tensor: ranks that share each expert: its inner dim is split over them.
        exchange: how tokens travel: one of ``EXCHANGES``.
    """

    size: int
    tensor: int = 1
    exchange: str = "auto"

    @classmethod
    def parse(cls, value: object) -> ExpertSpec:
        """Check ``4`` or a dict with the keys size, tensor and exchange. Raises SpecError."""
        entry = Entry(name="expert", value=value)
        if isinstance(value, int):
            return cls(size=entry.count("expert", value, 2))
        fields = entry.fields(KEYS, "expert=2 or expert=dict(size=2)")
        if "size" not in fields:
            raise entry.error("size is missing.", "Write size=2 to spread experts over two ranks.")
        tensor = entry.count("tensor", fields["tensor"], 2) if "tensor" in fields else 1
        exchange = entry.choice("exchange", fields.get("exchange", "auto"), EXCHANGES)
        return cls(size=entry.count("size", fields["size"], 2), tensor=tensor, exchange=exchange)

    def to_dict(self) -> dict[str, object]:
        """Return the entry that parses to this."""
        found: dict[str, object] = {"size": self.size}
        if self.tensor > 1:
            found["tensor"] = self.tensor
        if self.exchange != "auto":
            found["exchange"] = self.exchange
        return found

    @property
    def ranks(self) -> int:
        """The number of ranks that hold a copy of all experts together."""
        return self.size * self.tensor

    def fold(self, axes: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Return three groups of axes: their ranks hold different experts, parts of the same experts, and copies.

        All are axes of the mesh or factors of them (:class:`meshfold.mesh.Mesh`). Earlier axes are used first, as far as they can
        be. In an axis that gives a factor, neighbours hold different experts. Those that share an expert are the nearest neighbours
        of all.

        Args:
            axes: name to size of those that experts are folded out of, outermost first.

        Raises:
            SpecError: if their product does not divide by the ranks, or neighbours cannot share experts so.
        """
        self.check(axes)
        rest = self.ranks
        taken: list[tuple[str, int, int]] = []  # axis, how many of its ranks, its size
        copies: list[str] = []
        for name, size in axes.items():
            took = math.gcd(rest, size)
            rest //= took
            if took > 1:
                taken.append((name, took, size))
            if took < size:
                copies.append(name if took == 1 else f"{name}/{size // took}")
        experts: list[str] = []
        parts: list[str] = []
        sharing = self.tensor
        for name, took, size in reversed(taken):
            near = math.gcd(sharing, took)
            sharing //= near
            if near > 1:
                parts.insert(0, name if near == size else f"{name}%{near}")
            if near < took:
                if sharing > 1:
                    raise self._error(
                        f"the {took} ranks along {name} that experts are spread over cannot be shared by {self.tensor}",
                        took,
                    )
                inner = name if took == size else f"{name}%{took}"
                experts.insert(0, inner if near == 1 else f"{inner}/{took // near}")
        return tuple(experts), tuple(parts), tuple(copies)

    def check(self, axes: Mapping[str, int]) -> None:
        """Raise a SpecError if the product of the axes does not divide by the ranks."""
        ranks = math.prod(axes.values())
        if ranks % self.ranks == 0:
            return
        sizes = " × ".join(f"{name}={size}" for name, size in axes.items())
        shown = sizes if len(axes) == 1 else f"{sizes} = {ranks}"
        entry = Entry(name="expert", value=self.to_dict())
        if self.tensor == 1:
            larger = f"Write data={self.size} beside it, or size=1." if ranks == 1 else ""
            raise entry.error(
                f"experts are spread over ranks along data, sequence and tensor, and size {self.size} does not divide {shown}.",
                larger or f"Write size={join_choices(divisors(ranks)[:12])}.",
            )
        fits = [(s, t) for s in divisors(ranks) for t in divisors(ranks // s) if t > 1]
        write = join_choices([f"expert=dict(size={s}, tensor={t})" for s, t in fits[:6]]) if fits else "a larger data"
        raise entry.error(
            f"experts are spread over ranks along data, sequence and tensor, and size {self.size} × tensor {self.tensor} does not "
            f"divide {shown}.",
            f"Write {write}.",
        )

    def _error(self, problem: str, ranks: int) -> SpecError:
        entry = Entry(name="expert", value=self.to_dict())
        return entry.error(f"{problem}.", f"Write tensor={join_choices(divisors(ranks)[:12])}.")
