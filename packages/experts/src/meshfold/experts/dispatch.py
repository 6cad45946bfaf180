"""Tokens to the ranks that have their experts, and the sum of what these say back.

Experts lie in contiguous blocks on the ranks of a group. A token goes **once** to each other rank that has any of its experts.
That rank runs them, weights their outputs and adds them up, and one row comes back. So a layer sends, forward, two rows of h
elements for a token and a remote rank, whatever k is; backward sends the same. Beside them go the numbers of rows (one small
all-to-all, the one place where the host waits for the device) and, with each row, its k weights and expert numbers.

Ranks may also share each expert, whose inner dim is then split over neighbours: a token goes to all of these, each gives a part
of the output, and the parts add up where all that comes back does.

Gradients are exact: those of an expert's parameters sum over the tokens of all ranks of the group, as the sum of the ranks'
losses wants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.experts.counting import by_expert, expert_places, pairs_of, rank_places
from meshfold.experts.exchange import Exchange
from meshfold.experts.fp8_rows import pack, unpack
from meshfold.kernels import sum_rows, take_rows
from meshfold.mesh import Group, SpecError, all_gather, all_to_all, exchange_rows
from meshfold.mesh.collectives import adjoint_pair
from meshfold.mesh.processes import is_simulated

Run = Callable[[Tensor, Tensor, Sequence[int] | None], Tensor]
"""From rows [m, h] sorted by expert, ends [e] int32, and the numbers of rows where the host knows them, to outputs [m, h]."""
WeighingRun = Callable[[Tensor, Tensor, Sequence[int] | None, Tensor], Tensor]
"""The same with the weights [m] of the rows, to weighted outputs."""


def dispatch(
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    run: Run | WeighingRun,
    *,
    experts: int,
    group: Group | None = None,
    sharing: int = 1,
    weighs: bool = False,
    fp8: bool = False,
    capacity: float | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts: ``[n, h] -> [n, h]``, n of each rank its own.

    Args:
        tokens: [n, h] of this rank; n may be 0 and may differ between ranks.
        index: [n, k] whole numbers: the experts of each token, 0 to experts - 1; others count as none.
        weights: [n, k], any floating dtype.
        run: applies this rank's experts, or its part of each.
        experts: the number of all experts; rank i of the group has the (i // sharing)-th of as many blocks as there are such.
        group: None, or a group of one rank: all experts are here, and nothing is sent.
        sharing: how many neighbouring ranks have parts of the same experts, whose outputs add up to these experts'.
        weighs: ``run`` takes the weights of its rows too, and gives weighted outputs.
        fp8: tokens travel in float8 with a scale each, and so do gradients of what comes back; sums in both directions do not.
        capacity: at most ``ceil(capacity · tokens · k / experts)`` tokens an expert, counted over the group in the order of its
            ranks; the outputs of further ones are left out. None: none are.
        meanwhile: called once during the exchange, such as a shared expert; its backward overlaps with the exchange's, too.

    Raises:
        SpecError: if the ranks do not divide the experts.
        ValueError: if the shapes do not fit, or ``sharing`` does not divide the ranks.
    """
    if tokens.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or index.shape[0] != tokens.shape[0]:
        raise ValueError(
            f"dispatch takes tokens [n, h], index [n, k] and weights [n, k], got {list(tokens.shape)}, {list(index.shape)} "
            f"and {list(weights.shape)}"
        )
    ranks = 1 if group is None else group.size
    if ranks % sharing:
        raise ValueError(
            f"{ranks} ranks, of which {sharing} share each expert: the first number must be a multiple of the second"
        )
    y: Tensor = _in_eager_code(tokens, index, weights, run, experts, group, sharing, weighs, fp8, capacity, meanwhile)
    return y


@torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes are known on the host alone, and Inductor of torch 2.11 fails on grouped matmuls
def _in_eager_code(
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    run: Run | WeighingRun,
    experts: int,
    group: Group | None,
    sharing: int,
    weighs: bool,
    fp8: bool,
    capacity: float | None,
    meanwhile: Callable[[], object] | None,
) -> Tensor:
    """Do what :func:`dispatch` does, outside of compiled graphs."""
    ranks = 1 if group is None else group.size
    experts_each = experts_of_each(experts, ranks // sharing)
    if capacity is not None:
        index = within_capacity(index, experts, capacity, group)
    if group is None or ranks == 1:
        if meanwhile is not None:
            meanwhile()
        return _here(tokens, index, weights, run, weighs, experts, index.numel(), None)
    places, outgoing = rank_places(index, experts_each, ranks, sharing)
    sends, receives, counts = _sizes(index, outgoing, experts_each, group, sharing)
    pairs = pairs_of(places, sum(sends))
    travelling = Exchange(group, sends, receives, fp8=fp8)
    started = travelling.start(take_rows(tokens, pairs, places))
    carried = take_rows(weights, pairs, places)
    # Numbered from the first expert of the rank that receives them.
    numbers = index.index_select(0, pairs // ranks) - (pairs % ranks // sharing * experts_each).unsqueeze(1)
    arrived, mine = _Routing.apply(carried, numbers.to(torch.int32), group, sends, receives)
    if meanwhile is not None:
        meanwhile()
    rows = travelling.finish(started)
    partial = _here(rows, mine, arrived, run, weighs, experts_each, sum(counts), counts)
    return sum_rows(_exchange(partial, group, receives, sends, fp8), pairs, places)


def experts_of_each(experts: int, ranks: int) -> int:
    """Return the number of experts that each rank has.

    Raises:
        SpecError: if the ranks do not divide them.
    """
    if experts % ranks:
        fitting = [size for size in range(1, experts + 1) if experts % size == 0]
        raise SpecError(
            f"{experts} experts cannot be split evenly over {ranks} ranks: write expert=dict(size=...) with a "
            f"size that divides {experts}: {', '.join(map(str, fitting))}"
        )
    return experts // ranks


def within_capacity(index: Tensor, experts: int, capacity: float, group: Group | None) -> Tensor:
    """Return the index with -1 for tokens over the capacity of their expert: ``[n, k] -> [n, k]``.

    Pairs are counted in the order of the ranks, then of the tokens. Costs one all-gather of ``experts + 1`` numbers.

    Raises:
        SpecError: unless the capacity is a positive number.
    """
    if not (isinstance(capacity, int | float) and math.isfinite(capacity) and capacity > 0):
        raise SpecError(f"capacity={capacity!r}: write a positive number, such as 1.25, or None for no limit")
    places, counts = expert_places(index, experts)
    mine = torch.cat([counts, torch.full_like(counts[:1], index.shape[0])])
    everyone = mine.unsqueeze(0) if group is None else all_gather(mine.unsqueeze(0), group, 0)
    earlier = everyone[: 0 if group is None else group.index].sum(0)[:experts]
    total = everyone[:, experts].sum() * index.shape[1]
    most = torch.ceil(total.double() * capacity / experts).long()
    starts = counts.cumsum(0) - counts
    shift = torch.cat([earlier - starts, earlier.new_zeros(1)])
    bins = torch.where(places < 0, experts, index).long()
    position = places + shift[bins]
    return torch.where((places >= 0) & (position < most), index, -1)


def _here(
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    run: Any,
    weighs: bool,
    experts: int,
    rows: int,
    counts: Sequence[int] | None,
) -> Tensor:
    """Run experts that are all on this rank."""
    if index.is_meta and counts is None:
        counts = _evenly(rows, experts)
    found = by_expert(index, experts, rows)
    taken = take_rows(tokens, found.pairs, found.places)
    if not weighs:
        outputs = run(taken, found.ends, counts)
        return sum_rows(outputs.to(tokens.dtype), found.pairs, found.places, weights)
    of_rows = take_rows(weights.reshape(-1, 1), found.pairs, found.places.reshape(-1, 1)).squeeze(1)
    return sum_rows(run(taken, found.ends, counts, of_rows).to(tokens.dtype), found.pairs, found.places)


def _sizes(
    index: Tensor, outgoing: Tensor, experts_each: int, group: Group, sharing: int
) -> tuple[list[int], list[int], list[int]]:
    """Exchange sizes: rows to each rank, rows from each, pairs of each local expert. Only here does the host wait for the device.

    Tokens on the meta device go to experts as evenly as random choice would send them. In a simulated world others send what this
    rank sends to them.
    """
    blocks = group.size // sharing
    experts = experts_each * blocks
    if index.is_meta:
        tokens, each = index.shape
        missed = math.comb(experts - experts_each, each) / math.comb(experts, each)
        rows = [round(tokens * (1 - missed))] * group.size
        return rows, rows, _evenly(tokens * each * sharing, experts_each)
    safe = torch.where((index >= 0) & (index < experts), index, experts).long().flatten()
    wanted = torch.zeros(experts + 1, dtype=torch.int64, device=index.device)
    wanted = wanted.scatter_add_(0, safe, torch.ones_like(safe))[:experts].view(blocks, experts_each)
    if sharing > 1:
        wanted = wanted.repeat_interleave(sharing, 0)
    leaving = torch.cat([outgoing.unsqueeze(1), wanted], 1)
    incoming = all_to_all(leaving, group, 0, 0)
    if is_simulated():
        incoming = leaving
    numbers = torch.cat([outgoing, incoming[:, 0], incoming[:, 1:].sum(0)]).tolist()
    return numbers[: group.size], numbers[group.size : 2 * group.size], numbers[2 * group.size :]


def _evenly(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def _exchange(rows: Tensor, group: Group, sends: Sequence[int], receives: Sequence[int], fp8: bool) -> Tensor:
    """Exchange rows; backward sends the gradients back, in float8 if asked to."""

    def back(gradient: Tensor) -> Tensor:
        if fp8:
            return unpack(exchange_rows(pack(gradient), group, receives, sends).wait(), gradient.dtype)
        return exchange_rows(gradient, group, receives, sends).wait()

    return adjoint_pair(lambda x: exchange_rows(x, group, sends, receives).wait(), back)(rows)


class _Routing(torch.autograd.Function):
    """Sends the weights and the expert numbers of rows in one message; the gradients of the weights come back."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, numbers: Tensor, group: Group, sends: Sequence[int], receives: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        ctx.way = group, sends, receives
        size = weights.shape[1] * weights.element_size()
        message = torch.cat([weights.contiguous().view(torch.uint8), numbers.contiguous().view(torch.uint8)], 1)
        arrived = exchange_rows(message, group, sends, receives).wait()
        theirs = _columns(arrived, size, message.shape[1], numbers.dtype)
        if is_simulated():
            theirs = numbers.clone()
        ctx.mark_non_differentiable(theirs)
        return _columns(arrived, 0, size, weights.dtype), theirs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dweights: Tensor, _: Tensor) -> Any:
        group, sends, receives = ctx.way
        return exchange_rows(dweights, group, receives, sends).wait(), None, None, None, None


def _columns(message: Tensor, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return columns of bytes as numbers. A copy: a single row counts as contiguous, however its bytes are aligned."""
    return message[:, begin:end].clone(memory_format=torch.contiguous_format).view(dtype)
