"""The entry ``expert``: over how many ranks the experts of a mixture are spread, and which ranks these are.

Experts add no ranks. Their axis is folded out of the ranks that the other entries have: those along data, sequence and
tensor, which would else hold the same experts. So dense layers keep their layout, and an expert has as many copies as
the rest of these ranks makes (parallel folding: Liu et al. 2025, arXiv 2504.14960).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshfold.mesh.spec.entry import Entry, divisors, join_choices

KEYS = ("size",)


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """The checked entry ``expert``: ``size`` ranks hold different experts."""

    size: int

    @classmethod
    def parse(cls, value: object) -> ExpertSpec:
        """Check ``4`` or a dict with the key size. Raises SpecError."""
        entry = Entry(name="expert", value=value)
        if isinstance(value, int):
            return cls(size=entry.count("expert", value, 2))
        fields = entry.fields(KEYS, "expert=2 or expert=dict(size=2)")
        if "size" not in fields:
            raise entry.error("size is missing.", "Write size=2 to spread experts over two ranks.")
        return cls(size=entry.count("size", fields["size"], 2))

    def to_dict(self) -> dict[str, object]:
        """Return the entry that parses to this."""
        return {"size": self.size}

    def fold(self, axes: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the axes whose ranks hold different experts, and those whose ranks hold the same ones.

        Both are axes of the mesh or factors of them (:class:`meshfold.mesh.Mesh`). Earlier axes give what they can
        first; of an axis that gives a factor, neighbours hold different experts.

        Args:
            axes: name to size of those that experts are folded out of, outermost first.

        Raises:
            SpecError: if their product does not divide by the size.
        """
        self.check(axes)
        rest = self.size
        spread: list[str] = []
        alike: list[str] = []
        for name, size in axes.items():
            taken = math.gcd(rest, size)
            rest //= taken
            if taken > 1:
                spread.append(name if taken == size else f"{name}%{taken}")
            if taken < size:
                alike.append(name if taken == 1 else f"{name}/{size // taken}")
        return tuple(spread), tuple(alike)

    def check(self, axes: Mapping[str, int]) -> None:
        """Raise a SpecError if the product of the axes does not divide by the size."""
        ranks = math.prod(axes.values())
        if ranks % self.size == 0:
            return
        sizes = " × ".join(f"{name}={size}" for name, size in axes.items())
        shown = sizes if len(axes) == 1 else f"{sizes} = {ranks}"
        raise Entry(name="expert", value=self.to_dict()).error(
            f"experts are spread over ranks along data, sequence and tensor, and size {self.size} does not divide {shown}.",
            f"Write size={join_choices(divisors(ranks)[:12])}.",
        )
