"""The sizes of a batch, and the bytes of its blocks, from which a model's traffic is counted."""

from __future__ import annotations

from dataclasses import dataclass

from meshfold.folding.axial.axes import Axes
from meshfold.folding.axial.ring import ring_cost
from meshfold.tensor_parallel import CostEntry


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a batch.

    Attributes:
        residues: tokens of a chain, without padding.
        sequences: of the MSA, without padding.
        batch: samples.
        templates: of each sample.
        itemsize: bytes of an element.
    """

    residues: int
    sequences: int = 1
    batch: int = 1
    templates: int = 1
    itemsize: int = 4

    @property
    def wide(self) -> int:
        """Width of sums, which are in float32 or wider, in elements."""
        return max(4 // self.itemsize, 1)

    def pair(self, axes: Axes, channels: int) -> int:
        """Return the bytes of a rank's block of a pair tensor."""
        return self._block(axes, axes.padded(self.residues) ** 2, channels)

    def msa(self, axes: Axes, channels: int) -> int:
        """Return the bytes of a rank's block of an MSA."""
        return self._block(axes, axes.padded(self.sequences) * axes.padded(self.residues), channels)

    def single(self, axes: Axes, channels: int) -> int:
        """Return the bytes of a rank's block of a single representation."""
        return self._block(axes, axes.padded(self.residues), channels)

    def _block(self, axes: Axes, elements: int, channels: int) -> int:
        return self.batch * elements // axes.multiple * channels * self.itemsize


Split = tuple[tuple[str, ...], int]
"""A dim that is split: its axes and its size without padding."""


def split_cost(axes: Axes, operand: str, block_bytes: int, *dims: Split) -> list[CostEntry]:
    """Return the collectives of :meth:`.Axes.split`: its backward all-gathers the last dim first."""
    return _gathers(axes, "backward", f"d{operand}", block_bytes, *reversed(dims))


def join_cost(axes: Axes, operand: str, block_bytes: int, *dims: Split) -> list[CostEntry]:
    """Return the collectives of :meth:`.Axes.join`: it all-gathers the first dim first."""
    return _gathers(axes, "forward", operand, block_bytes, *dims)


def rows_cost(
    axes: Axes, line_bytes: int, key_bytes: int, bias_bytes: int, wide: int, bias_layout: str = "q:rows k:columns"
) -> list[CostEntry]:
    """Return the collectives of :func:`.attend_rows`.

    Args:
        axes: of the rows.
        line_bytes: of this rank's block of what attends, all channels.
        key_bytes: of its keys.
        bias_bytes: of its block of the pair bias, all heads; 0: there is none.
        wide: how many times wider than an element the sums of gradients are.
        bias_layout: how the pair bias lies.
    """
    from meshfold.folding.axial.attention import BIAS, LINE

    entries: list[CostEntry] = []
    exchanges = axes.keys == "exchange"
    if bias_bytes:
        move = axes.move(bias_layout, "q k" if exchanges else "q:columns k", BIAS)
        entries += move.cost("bias", bias_bytes)
    if exchanges:
        entries += axes.move("a:rows n:columns", "a:rows,columns n", LINE).cost("x", line_bytes)
        entries += axes.move("a:rows,columns n", "a:rows n:columns", LINE).cost("y", line_bytes)
    elif axes.keys == "gather":
        entries += axes.move("a:rows n:columns", "a:rows n", LINE).cost("kv", 2 * key_bytes)
    else:
        entries += ring_cost(axes.mesh, axes.columns, key_bytes, key_bytes * wide)
    return entries


def _gathers(axes: Axes, phase: str, operand: str, block_bytes: int, *dims: Split) -> list[CostEntry]:
    entries = []
    for names, length in dims:
        for axis in reversed(names):
            size = axes.mesh.size(axis)
            block_bytes *= size
            if size > 1:
                entries.append(CostEntry(phase, "all_gather", operand, axes.mesh.spanned(axis), size, block_bytes))
        block_bytes = block_bytes // axes.padded(length) * length  # padding is dropped before the next dim
    return entries
