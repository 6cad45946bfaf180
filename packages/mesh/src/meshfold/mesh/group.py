"""The ranks that a collective runs over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks that share all coordinates except those along ``axes``: the group of a collective.

    Attributes:
        axes: the mesh axes spanned, in mesh order, without axes of size 1.
        ranks: global ranks, ascending, which is row-major order over ``axes``.
        index: this process's position in ``ranks``.
        name: what torch.distributed calls the group; empty for a group that never communicates: of one rank,
            or of a :class:`.MetaMesh`.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    name: str

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)
