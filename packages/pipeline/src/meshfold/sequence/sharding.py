"""Shardings of a sequence over ranks, and the table of modes: over which axes the ring and the all-to-all run.

Contiguous: rank r of P has piece r of P. Zigzag: the sequence is cut into 2 P pieces, and rank r has pieces r and 2 P - 1 - r, an
early and a late one. Causal attention then costs every rank the same. On ``ring`` × ``ulysses`` the pieces are sharded over the
ring. Ranks that share a place in the ring each have a contiguous part of its pieces. A length that does not divide is padded at the
end; padding never counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from meshfold.mesh import LayoutError, Mesh, did_you_mean

ORDERS = ("zigzag", "contiguous")

Pieces = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class SequenceSharding:
    """A sequence of ``length`` tokens sharded over ``ring · ulysses`` ranks.

    Attributes:
        length: tokens of the whole sequence, without padding.
        ring: ranks of the ring.
        ulysses: ranks that share a place in the ring.
        order: "zigzag" or "contiguous".

    Rank numbers are row-major: ``ring index · ulysses + ulysses index``.
    """

    length: int
    ring: int = 1
    ulysses: int = 1
    order: str = "zigzag"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise LayoutError(f"a sequence of {self.length} tokens cannot be sharded: give it at least one")
        check_order(self.order)

    @property
    def ranks(self) -> int:
        """Number of ranks that share the sequence."""
        return self.ring * self.ulysses

    @property
    def unit(self) -> int:
        """The padded length is a multiple of this, in tokens."""
        halves = 2 if self.order == "zigzag" and self.ring > 1 else 1
        return self.ring * math.lcm(halves, self.ulysses)

    @property
    def padded(self) -> int:
        """Tokens of the whole sequence with padding at its end."""
        return -(-self.length // self.unit) * self.unit

    @property
    def local(self) -> int:
        """Tokens of each rank."""
        return self.padded // self.ranks

    def ring_pieces(self, index: int) -> Pieces:
        """Return the pieces [start, stop) of a place in the ring, in ascending order."""
        share = self.padded // self.ring
        if self.order == "contiguous" or self.ring == 1:
            return ((index * share, (index + 1) * share),)
        half, late = share // 2, 2 * self.ring - 1 - index
        if late == index + 1:
            return ((index * half, (late + 1) * half),)
        return ((index * half, (index + 1) * half), (late * half, (late + 1) * half))

    def pieces(self, rank: int) -> Pieces:
        """Return the pieces [start, stop) of a rank, in ascending order, which is the order in which it holds them."""
        index, part = divmod(rank, self.ulysses)
        first, last = part * self.local, (part + 1) * self.local
        found: list[tuple[int, int]] = []
        passed = 0
        for start, stop in self.ring_pieces(index):
            low, high = max(first - passed, 0), min(last - passed, stop - start)
            if low < high:
                found.append((start + low, start + high))
            passed += stop - start
        return tuple(found)

    def indices(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the index in the padded sequence of each of the rank's tokens: ``local``, int64.

        They are made on the device: a copy from the host would wait for all that is queued there.
        """
        return torch.cat([torch.arange(*piece, device=device) for piece in self.pieces(rank)])

    def inverse(self) -> Tensor:
        """Return the index of each token in the concatenated shards of all ranks: ``padded``, int64."""
        indices = torch.cat([self.indices(rank) for rank in range(self.ranks)])
        return torch.empty_like(indices).scatter_(0, indices, torch.arange(self.padded, device="cpu"))

    def shard(self, x: Tensor, rank: int, dim: int = 1, pad: float = 0) -> Tensor:
        """Return a rank's tokens of a whole sequence: ``b length .. -> b local ..``; differentiable.

        Args:
            x: whole along ``dim``.
            rank: which rank's tokens.
            dim: the sequence dim.
            pad: the value of padding.

        Raises:
            LayoutError: if ``x`` is not ``length`` long.
        """
        dim = dim % x.dim()
        if x.shape[dim] != self.length:
            raise LayoutError(
                f"dim {dim} of a tensor of shape {tuple(x.shape)} should hold the whole sequence of {self.length} tokens"
            )
        if self.ranks == 1:
            return x
        parts = [
            x.narrow(dim, start, min(stop, self.length) - start)
            for start, stop in self.pieces(rank)
            if start < self.length
        ]
        missing = self.local - sum(part.shape[dim] for part in parts)
        if missing:
            parts.append(x.new_full((*x.shape[:dim], missing, *x.shape[dim + 1 :]), pad))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, shards: Sequence[Tensor] | Tensor, dim: int = 1) -> Tensor:
        """Join the shards of all ranks to the whole sequence, without padding: the inverse of :meth:`shard`.

        Args:
            shards: one per rank, in order, or one tensor that concatenates them along ``dim``.
            dim: the sequence dim.
        """
        joined = shards if isinstance(shards, Tensor) else torch.cat(list(shards), dim)
        if joined.shape[dim] != self.padded:
            raise LayoutError(
                f"the shards have {joined.shape[dim]} tokens along dim {dim} of {tuple(joined.shape)}, and a "
                f"sequence of {self.length} sharded over {self.ranks} ranks has {self.padded}"
            )
        if self.ring == 1 or self.order == "contiguous":
            return joined.narrow(dim, 0, self.length)
        return joined.index_select(dim, inverse_of(self)[: self.length].to(joined.device, non_blocking=True))

    def positions(
        self, rank: int, documents: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return the position of each of the rank's tokens, for rotary tables and learned positions: ``local``, int64.

        Args:
            rank: whose tokens.
            documents: cumulative lengths; positions start again at each document.
            device: where to make them.

        Padding has the position of the last token, so that no table is read beyond its end.
        """
        if documents is None:
            return self.indices(rank, device).clamp_(max=self.length - 1)
        index = self.indices(rank).clamp_(max=self.length - 1)
        bounds = torch.tensor(check_documents(documents, self.length), dtype=torch.int64, device="cpu")
        return (index - bounds[torch.searchsorted(bounds, index, right=True) - 1]).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def inverse_of(sharding: SequenceSharding) -> Tensor:
    """Return :meth:`SequenceSharding.inverse`, cached."""
    return sharding.inverse()


def check_order(order: str) -> str:
    """Raise a LayoutError for an unknown order."""
    if order not in ORDERS:
        raise LayoutError(
            f"order={order!r}: a sequence is sharded in the order {' or '.join(map(repr, ORDERS))}."
            f"{did_you_mean(str(order), ORDERS)}"
        )
    return order


def check_documents(documents: Sequence[int] | Tensor, length: int) -> tuple[int, ...]:
    """Return the cumulative lengths of packed documents as a tuple: 0, the end of the first, ..., the length of the sequence.

    Raises:
        LayoutError: if they are anything else.
    """
    values = documents.tolist() if isinstance(documents, Tensor) else list(documents)
    bounds = tuple(int(value) for value in values)
    rising = all(a < b for a, b in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != length or not rising:
        shown = str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:6]))}, ..., {values[-1]}]"
        raise LayoutError(
            f"documents={shown}: cumulative lengths start at 0, increase, and end with the length of the sequence, "
            f"here {length}; two documents of 3 and 5 tokens are (0, 3, 8)"
        )
    return bounds


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A row of the table.

    Attributes:
        ring: the axes that keys and values travel on.
        ulysses: the axes over which heads are split during attention.
        order: the default order of the sequence.
    """

    ring: tuple[str, ...] = ()
    ulysses: tuple[str, ...] = ()
    order: str = "zigzag"

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that the sequence is split over, major first."""
        return self.ring + self.ulysses


MODES: Mapping[str, Mode] = {
    "ring": Mode(ring=("seq",)),
    "ulysses": Mode(ulysses=("seq",)),
    "ring_ulysses": Mode(ring=("ring",), ulysses=("ulysses",)),
    "ring_self": Mode(ring=("seq",), order="contiguous"),
}
_OWN = Mode(ring=("seq",), order="contiguous")  # custom attention, which communicates over the axis itself


def sequence_mode(mode: str | Callable[..., object], mesh: Mesh) -> Mode:
    """Return the row of a mode, checked against the mesh.

    Raises:
        LayoutError: for an unknown mode, or a mesh with the sequence axes of another mode.
    """
    if callable(mode):
        return _OWN
    if mode == "megatron":
        raise LayoutError(
            "mode='megatron' splits the sequence between the layers of tensor parallelism and leaves attention whole: it "
            "belongs to meshfold.tensor_parallel, tensor=dict(mode='1d', ...) with sequence=dict(mode='megatron')"
        )
    if mode not in MODES:
        raise LayoutError(f"mode={mode!r}: write one of {', '.join(map(repr, MODES))}.{did_you_mean(str(mode), MODES)}")
    found = MODES[mode]
    others = [axis for axis in ("seq", "ring", "ulysses") if axis not in found.axes and mesh.size(axis) > 1]
    if others:
        fitting = "ring_ulysses" if "seq" not in others else "ring"
        raise LayoutError(
            f"mode={mode!r} splits the sequence over the axis {' × '.join(found.axes)}, but {mesh} splits it over "
            f"{' × '.join(others)}: write mode={fitting!r}, or make the mesh from sequence=dict(mode={mode!r}, ...)"
        )
    return found


def sequence_sharding(
    length: int, mesh: Mesh, mode: str | Callable[..., object], order: str | None = None
) -> SequenceSharding:
    """Return the sharding of a sequence of ``length`` tokens under a mode.

    Raises:
        LayoutError: for an unknown mode or order, or a mesh that does not fit the mode.
    """
    found = sequence_mode(mode, mesh)
    return SequenceSharding(
        length=length,
        ring=mesh.size(*found.ring),
        ulysses=mesh.size(*found.ulysses),
        order=found.order if order is None else check_order(order),
    )
