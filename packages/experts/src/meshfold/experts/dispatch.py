"""Send tokens to the ranks that have their experts, and sum the outputs that come back.

Experts lie in contiguous blocks on the ranks of a group. A token goes **once** to each other rank that has any of its experts. That
rank runs them, sums their weighted outputs and sends one row back. In forward a layer thus sends two rows of h elements for each
token and remote rank, for any k; backward sends the same. Each row is sent with its k weights and expert numbers. There are two
exchanges (:mod:`meshfold.experts.ways`):

- all-to-all: only rows that a rank works on are sent. Their counts are exchanged first, in one small all-to-all that the host waits
  for.
- all-gather: all tokens go to all ranks, so the host knows all sizes without waiting for the device. Rows of experts are counted on
  the device only; the host allocates the largest number possible, which a capacity bounds. Backward keeps at most twice the mean
  of them (:mod:`meshfold.experts.spilled`). :func:`chosen_exchange` says when that is cheap.

Ranks may also share each expert: its inner dim is split over neighbouring ranks. A token goes to all of them. Each returns a
partial sum of the output, and these are added together with everything else that comes back.

Gradients are exact for the sum of the ranks' losses: an expert's parameters sum them over the tokens of all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.experts.capacity import chance_missed, check_capacity, kept_share, most_rows, within_capacity
from meshfold.experts.counting import rank_places
from meshfold.experts.exchange import Exchange, send_back, send_routing
from meshfold.experts.expert_rows import Run
from meshfold.experts.spilled import PlacedRows, RunOfRows, run_in_parts
from meshfold.experts.ways import ToAll, ToSome, Way
from meshfold.kernels import expert_places, pairs_of, sum_rows, take_rows
from meshfold.mesh import Group, SpecError, all_to_all
from meshfold.mesh.processes import is_simulated, start_largest
from meshfold.mesh.spec import EXCHANGES

USED = 0.6
"""Smallest share of an all-gather's rows that ranks work on for it to be chosen."""
ROOM = 2
"""Most rows of experts, as a multiple of those expected, that are allocated unless asked for, and that backward keeps."""
FEW = 4096
"""Rows beyond these that backward keeps too, if there are no more: computing them apart would launch more than it saves memory."""


def dispatch(
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    run: Run,
    *,
    experts: int,
    group: Group | None = None,
    sharing: int = 1,
    weighs: bool = False,
    fp8: bool = False,
    capacity: float | None = None,
    exchange: str = "auto",
    meanwhile: Callable[[], object] | None = None,
    parameters: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts: ``[n, h] -> [n, h]``, n of each rank its own.

    Args:
        tokens: [n, h] of this rank; n may be 0 and may differ between ranks.
        index: [n, k] whole numbers: the experts of each token, 0 to experts - 1; others count as none.
        weights: [n, k], any floating dtype.
        run: applies this rank's experts, or its part of each.
        experts: the number of all experts; rank i of the group has the (i // sharing)-th block of them.
        group: None, or a group of one rank: all experts are here, and nothing is sent.
        sharing: how many neighbouring ranks have parts of the same experts, whose outputs add up to these experts'.
        weighs: ``run`` is given the weights of its rows too, and gives weighted outputs.
        fp8: tokens, and gradients of the sums that come back, are sent in float8 with a scale each. The sums themselves are not.
        capacity: at most ``ceil(capacity · tokens · k / experts)`` tokens an expert, counted over the group in the order of its
            ranks; outputs of tokens beyond that are left out. None: no limit.
        exchange: ``"all_to_all"``, ``"all_gather"``, or ``"auto"``: see :func:`chosen_exchange`. The same on all ranks.
        meanwhile: called once during the exchange, such as a shared expert; its backward also overlaps with the exchange's.
        parameters: of the experts, by name. With an all-gather backward then keeps at most ``ROOM`` times the mean of rows, and
            computes those beyond again: ``run`` takes its parameters from :attr:`ExpertRows.parameters` where that has some. None:
            backward keeps all rows.

    Raises:
        SpecError: if the ranks do not divide the experts, for another exchange, or for a capacity that is no positive number.
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
    check_capacity(capacity)
    how = chosen_exchange(exchange, blocks=ranks // sharing, top_k=index.shape[1], capacity=capacity)
    y: Tensor = _in_eager_code(
        tokens, index, weights, run, experts, group, sharing, weighs, fp8, capacity, how, meanwhile, parameters
    )
    return y


def chosen_exchange(exchange: str, *, blocks: int, top_k: int, capacity: float | None = None) -> str:
    """Return ``"all_to_all"`` or ``"all_gather"`` for an exchange that may be ``"auto"``.

    ``"auto"`` is an all-gather if two conditions hold. Ranks work on most of its rows: 1 - (1 - 1/blocks)^k of them for random
    experts. The largest number of rows that experts may get is at most twice the expected one. It is ``blocks`` times as many, or
    with a capacity ``capacity`` times, so without one the second condition decides on more than two ranks. With 8 experts a token
    and four ranks an all-gather sends a tenth more, but in each layer's forward there is room for four times the rows, and the
    experts are launched again for those beyond twice the mean, of which there are nearly always none.

    Args:
        exchange: one of ``EXCHANGES``.
        blocks: how many ranks have different experts.
        top_k: experts of a token.
        capacity: of the experts; None for no limit.

    Raises:
        SpecError: for another word.
    """
    if exchange not in EXCHANGES:
        raise SpecError(f"exchange={exchange!r}: write one of {', '.join(map(repr, EXCHANGES))}")
    if exchange != "auto":
        return exchange
    used = 1 - (1 - kept_share(capacity) / blocks) ** top_k
    room = blocks if capacity is None else min(blocks, capacity)
    return "all_gather" if used >= USED and room <= ROOM else "all_to_all"


@torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes are known on the host alone, and Inductor of torch 2.11 fails on grouped matmuls
def _in_eager_code(
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    run: Run,
    experts: int,
    group: Group | None,
    sharing: int,
    weighs: bool,
    fp8: bool,
    capacity: float | None,
    exchange: str,
    meanwhile: Callable[[], object] | None,
    parameters: Mapping[str, Tensor] | None,
) -> Tensor:
    """Do what :func:`dispatch` does, outside of compiled graphs."""
    ranks = 1 if group is None else group.size
    experts_each = experts_of_each(experts, ranks // sharing)
    of_rows = RunOfRows(run=run, weighs=weighs, keeps=ranks == 1 or exchange == "all_to_all")
    # Said before anything is launched: counting what a capacity leaves takes longer than the hosts' message.
    largest = start_largest(tokens.shape[0], group) if group is not None and exchange == "all_gather" else None
    if capacity is not None:
        index = within_capacity(index, experts, capacity, group)
    if group is None or ranks == 1:
        if meanwhile is not None:
            meanwhile()
        rows = most_rows(index.numel(), experts, experts, capacity)
        return _here(tokens, index, weights, of_rows, experts, rows, None)
    if largest is None:
        trip = _to_some(tokens, index, weights, experts_each, group, sharing, capacity)
    else:
        trip = _to_all(tokens, index, weights, experts_each, group, sharing, capacity, largest)
    travelling = Exchange(trip.way, fp8=fp8)
    started = travelling.start(trip.tokens)
    arrived, numbers = send_routing(trip.weights, trip.numbers, trip.way)
    if meanwhile is not None:
        meanwhile()
    partial = _here(
        travelling.finish(started),
        numbers - trip.first if trip.first else numbers,
        arrived,
        of_rows,
        experts_each,
        trip.most,
        trip.counts,
        kept=trip.kept,
        parameters=parameters,
    )
    return trip.home(send_back(partial, trip.way, fp8=fp8))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trip:
    """Rows to be sent, and what the ranks that receive them must know.

    Attributes:
        way: how they travel.
        tokens: [m, h].
        weights, numbers: [m, k]: of their experts.
        first: what to subtract from the numbers that arrive here: the first expert of this rank, if they count all experts.
        most: rows that this rank's experts get at most.
        kept: of these rows, how many backward may keep.
        counts: how many each of them gets, where the host knows them.
        home: from the sums that come back to this rank's tokens.
    """

    way: Way
    tokens: Tensor
    weights: Tensor
    numbers: Tensor
    first: int
    most: int
    kept: int
    counts: Sequence[int] | None
    home: Callable[[Tensor], Tensor]


def _to_some(
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    experts_each: int,
    group: Group,
    sharing: int,
    capacity: float | None,
) -> _Trip:
    """Send each rank the tokens that it works on; the index is within the capacity."""
    places, outgoing = rank_places(index, experts_each, group.size, sharing)
    sends, receives, counts = _sizes(index, outgoing, experts_each, group, sharing, capacity)
    pairs = pairs_of(places, sum(sends))
    # Numbered from the first expert of the rank that receives them.
    numbers = index.index_select(0, pairs // group.size) - (pairs % group.size // sharing * experts_each).unsqueeze(1)
    return _Trip(
        way=ToSome(group=group, sends=sends, receives=receives),
        tokens=take_rows(tokens, pairs, places),
        weights=take_rows(weights, pairs, places),
        numbers=numbers.to(torch.int32),
        first=0,
        most=sum(counts),
        kept=sum(counts),
        counts=counts,
        home=lambda sums: sum_rows(sums, pairs, places),
    )


def _to_all(
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    experts_each: int,
    group: Group,
    sharing: int,
    capacity: float | None,
    largest: Callable[[], int],
) -> _Trip:
    """Send all tokens to all ranks; a rank with fewer pads them with tokens of no expert. The host does not wait for the device.

    Padded tokens are at least the real ones, so the room for them that a capacity leaves is enough for these.
    """
    own, each = index.shape
    blocks = group.size // sharing
    numbers = index.clamp(-1, experts_each * blocks).to(torch.int32)
    rows = largest()  # waits for the other hosts
    more = rows - own
    if more:
        tokens, weights = (F.pad(x, (0, 0, 0, more)) for x in (tokens, weights))
        numbers = F.pad(numbers, (0, 0, 0, more), value=-1)
    way = ToAll(group=group, rows=rows)
    pairs = way.arriving * each
    room = most_rows(pairs, experts_each * blocks, experts_each, capacity)
    kept = ROOM * -(-pairs // blocks)
    return _Trip(
        way=way,
        tokens=tokens,
        weights=weights,
        numbers=numbers,
        first=group.index // sharing * experts_each,
        most=room,
        kept=kept if room - kept > FEW else room,
        counts=_evenly(min(room, pairs // blocks), experts_each) if index.is_meta else None,
        home=lambda sums: sums[:own] if more else sums,
    )


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


def _here(
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    run: RunOfRows,
    experts: int,
    rows: int,
    counts: Sequence[int] | None,
    *,
    kept: int | None = None,
    parameters: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Run experts that are all on this rank, on at most ``rows`` rows, of which backward keeps at most ``kept``, None: all."""
    if index.is_meta and counts is None:
        counts = _evenly(rows, experts)
    places, pairs, ends = expert_places(index, experts, rows)
    placed = PlacedRows(places=places, pairs=pairs, ends=ends, counts=counts)
    if kept is None or kept >= rows or parameters is None:
        return run(tokens, weights, placed)
    return run_in_parts(run, tokens, weights, placed, kept, parameters)


def _sizes(
    index: Tensor, outgoing: Tensor, experts_each: int, group: Group, sharing: int, capacity: float | None
) -> tuple[list[int], list[int], list[int]]:
    """Exchange sizes: rows to each rank, rows from each, pairs of each local expert. Only this makes the host wait.

    On the meta device tokens are spread over experts as evenly as a random choice would; operators and message are those of a
    real layer, so that plans count them. In a simulated world the other ranks send what this rank sends to them.
    """
    blocks = group.size // sharing
    experts = experts_each * blocks
    safe = torch.where((index >= 0) & (index < experts), index, experts).long().flatten()
    wanted = torch.zeros(experts + 1, dtype=torch.int64, device=index.device)
    wanted = wanted.scatter_add_(0, safe, torch.ones_like(safe))[:experts].view(blocks, experts_each)
    if sharing > 1:
        wanted = wanted.repeat_interleave(sharing, 0)
    leaving = torch.cat([outgoing.unsqueeze(1), wanted], 1)
    incoming = all_to_all(leaving, group, 0, 0)
    if is_simulated():
        incoming = leaving
    found = torch.cat([outgoing, incoming[:, 0], incoming[:, 1:].sum(0)])
    if index.is_meta:
        tokens, each = index.shape
        missed = chance_missed(experts, experts_each, each, capacity)
        rows = [round(tokens * (1 - missed))] * group.size
        return rows, rows, _evenly(round(tokens * each * sharing * kept_share(capacity)), experts_each)
    numbers = found.tolist()
    return numbers[: group.size], numbers[group.size : 2 * group.size], numbers[2 * group.size :]


def _evenly(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]
