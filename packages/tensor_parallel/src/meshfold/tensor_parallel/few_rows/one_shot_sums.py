"""Sums of few rows over memory that ranks share, with residual and norm; each way is tried on all ranks before it is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from meshfold.kernels import (
    PACKET_TRIES,
    OneShotMemory,
    RowWeight,
    one_shot_bytes,
    one_shot_rows,
    one_shot_slot,
    one_shot_sum,
    packet_bytes,
    packet_product,
    packet_rows,
    packet_sum,
    row_product,
    sum_add_norm,
)
from meshfold.mesh import Group, SpecError
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.collectives.push import peer_memory


class SumNorm(Protocol):
    """Sums rows over ranks, adds the stream and normalises: :class:`OneShot`.

    Attributes:
        rows: that it takes at most.
    """

    rows: int

    def __call__(
        self, x: Tensor, stream: Tensor, gain: Tensor, eps: float, call: int, adds: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the sum, or stream + sum if it ``adds``, and the norm of stream + sum, ``rows h``; ``call``: of the token."""

    def of_product(
        self, x: Tensor, layer: RowWeight, stream: Tensor, gain: Tensor, eps: float, call: int, adds: bool, norm: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Sum the product of one row ``.. k`` with a weight; the normed row may be None unless ``norm``."""

    def plain(self, x: Tensor, call: int) -> Tensor:
        """Return the sum of rows alone."""


class OneShot:
    """The kernels over memory that the ranks of a group share.

    Attributes:
        rows: that they take at most.
        packet_rows: that are summed by packets, data and flag in one word; more rows raise flags after their data.
        sends: the product that makes a single row sends its packets.
        without: why no rows take packets; empty if some do.
    """

    def __init__(
        self, group: Group, columns: int, dtype: torch.dtype, device: torch.device, *, packets: bool = True
    ) -> None:
        """Args:
        group: that sums; all its ranks must make one.
        columns: of the stream.
        dtype: of the rows.
        device: of this rank.
        packets: try packets, and take them if their sums are right on all ranks.

        Raises:
            SpecError: if the ranks do not reach each other's memory, or there are too many of them.
        """
        self.rows = one_shot_rows(columns, dtype.itemsize, group.size)
        if not self.rows:
            raise SpecError(f"{group.size} ranks with rows of {columns} elements sum faster in another way")
        length = one_shot_bytes(self.rows, columns, dtype.itemsize, group.size)
        found = peer_memory(group, f"one-shot sums of {self.rows} x {columns} {dtype}", length, device)
        if isinstance(found, str):
            raise SpecError(found)
        self._peers = [found]  # keeps the memory
        self._memory = OneShotMemory(found.addresses, group.index, self.rows, columns, dtype)
        self.packet_rows = packet_rows(columns, dtype.itemsize, group.size) if packets else 0
        self._packets: OneShotMemory | None = None
        self.without = "" if self.packet_rows else "not asked for" if not packets else "rows are too long"
        if not self.without:
            self._packets, self.without = self._opened(group, self.packet_rows, device)
        if self.without:
            self.packet_rows = 0
        # Those of products are in a memory of their own: a try that fails leaves epochs that differ.
        self._sent, problem = (None, "") if self.without else self._opened(group, 1, device, sends=True)
        self.sends = self._sent is not None and not problem

    def __call__(
        self, x: Tensor, stream: Tensor, gain: Tensor, eps: float, call: int, adds: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sum by a kernel."""
        slot = one_shot_slot(call)
        if x.shape[0] <= self.packet_rows:
            assert self._packets is not None
            total, normed = packet_sum(x, stream, gain, eps, self._packets, slot, adds=adds)
            assert normed is not None
            return total, normed
        return one_shot_sum(x, stream, gain, eps, self._memory, slot, adds=adds)

    def of_product(
        self,
        x: Tensor,
        layer: RowWeight,
        stream: Tensor,
        gain: Tensor,
        eps: float,
        call: int,
        adds: bool = False,
        norm: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Sum the product of one row, which sends it where it can."""
        if self._sent is None or not self.sends or x.dtype != self._sent.dtype:
            return self(row_product(x, layer).view(1, -1), stream, gain, eps, call, adds)
        slot = one_shot_slot(call)
        packet_product(x, layer, self._sent, slot)
        return packet_sum(None, stream, gain, eps, self._sent, slot, adds=adds, norm=norm)

    def plain(self, x: Tensor, call: int) -> Tensor:
        """Sum by a kernel."""
        slot = one_shot_slot(call)
        if x.shape[0] <= self.packet_rows:
            assert self._packets is not None
            return packet_sum(x, x, x[0], 0.0, self._packets, slot, norm=False)[0]
        return one_shot_sum(x, x, x[0], 0.0, self._memory, slot)[0]

    def _opened(
        self, group: Group, rows: int, device: torch.device, *, sends: bool = False
    ) -> tuple[OneShotMemory | None, str]:
        """Open memory for packets of so many rows, and try sums over it; return it, and why it is not taken.

        ``sends``: products send them.
        """
        columns, dtype = self._memory.columns, self._memory.dtype
        length = packet_bytes(rows, columns, dtype.itemsize, group.size)
        purpose = f"packets of {'products of ' * sends}{rows} x {columns} {dtype}"
        found = peer_memory(group, purpose, length, device)
        if isinstance(found, str):
            return None, found
        self._peers.append(found)
        memory = OneShotMemory(found.addresses, group.index, rows, columns, dtype)
        # Its product with any row is the row.
        same = RowWeight(torch.eye(columns, dtype=dtype, device=device)) if sends else None
        return memory, _tried(partial(_summed, memory, same), group, sorted({1, rows}), columns, dtype, device)


def _summed(
    memory: OneShotMemory,
    same: RowWeight | None,
    x: Tensor,
    stream: Tensor,
    gain: Tensor,
    eps: float,
    *,
    slot: int,
    waits: bool = True,
) -> tuple[Tensor, Tensor]:
    """Sum rows by packets; a kernel that does not wait is of the same compiled code.

    Of products, the sums in one of the slots leave the norm, so that both kernels are tried.
    """
    norm, tries = same is None or slot != 1, PACKET_TRIES if waits else 16
    if same is not None:
        packet_product(x, same, memory, slot)
    total, y = packet_sum(x if same is None else None, stream, gain, eps, memory, slot, norm=norm, tries=tries)
    return total, sum_add_norm([total], stream, gain, eps)[1] if y is None else y


def _tried(
    compute: Callable[..., tuple[Tensor, Tensor]],
    group: Group,
    rows: Sequence[int],
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """Compile on all ranks, then compare as :func:`wrong_sums` does; ``compute`` takes ``waits`` too. Return what is wrong."""
    # Ranks compile at their own pace: each does so, and all meet, before one waits for another's packets.
    reason = ""
    try:
        row = torch.zeros(1, columns, dtype=dtype, device=device)
        for call in range(2):
            compute(row, row, row[0], 1e-5, slot=one_shot_slot(call), waits=False)
    except Exception as problem:  # of Triton's compiler
        reason = _first_line(problem)
    reason = next(filter(None, all_gather_object(reason, group, device)), "")
    return reason or wrong_sums(compute, group, rows, columns, dtype, device)


def wrong_sums(
    compute: Callable[..., tuple[Tensor, Tensor]],
    group: Group,
    rows: Sequence[int],
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """Compare sums of random rows with their reference in every slot; return why they are not right, the same on all ranks.

    Ranks exchange nothing but their sums until the end: one that fails does not keep others from it.

    Args:
        compute: called as ``compute(x, stream, gain, eps, slot=slot)``.
        group: that sums.
        rows: that are tried.
        columns, dtype, device: of the rows.
    """

    def drawn(seed: int, *shape: int) -> Tensor:
        random = torch.Generator(device).manual_seed(seed)
        return torch.randn(*shape, generator=random, device=device).to(dtype)

    reason, limit = "", 1e-4 if dtype.itemsize > 2 else 2e-2
    try:
        for call in range(3 * len(rows)):
            if reason:
                break  # each further call would wait for peers that have stopped
            shape = (rows[call % len(rows)], columns)
            parts = [drawn(1000 * call + rank, *shape) for rank in range(group.size)]
            stream, gain = drawn(call + 1_000_000, *shape), drawn(call + 2_000_000, columns)
            found = compute(parts[group.index], stream, gain, 1e-5, slot=one_shot_slot(call))
            for mine, exact in zip(found, sum_add_norm(parts, stream, gain, 1e-5), strict=True):
                error = float((mine.float() - exact.float()).norm() / exact.float().norm())
                if not error < limit:
                    reason = f"sums of {shape[0]} rows differ from their reference by {error:.1%}"
    except Exception as problem:
        reason = _first_line(problem)
    return next(filter(None, all_gather_object(reason, group, device)), "")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().split("\n")[0]
