"""All-gather and reduce-scatter by pushes: drop-in transports of the collectives of the same names.

Blocks go in pieces, so that a channel of fixed size serves messages of any. Arriving data is copied out, or summed, on a separate
stream, and the slot is released at once. Results may be waited for in any order, or late. Recorded bytes, the calls that the
watchdog counts, and results equal the collectives'. Only reduce-scatter's sum is more precise: in float32, and rounded once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import torch
from torch import Tensor

from meshfold.mesh.collectives.operations import Pending, all_gather_into, note_call, reduce_scatter
from meshfold.mesh.collectives.push.channel import Channel
from meshfold.mesh.collectives.push.channels import channel
from meshfold.mesh.collectives.push.epochs import sources, targets
from meshfold.mesh.collectives.push.part_sums import SQUARED_TOGETHER, has_exact_squares, sum_parts
from meshfold.mesh.collectives.push.transport import STREAMS, Transport
from meshfold.mesh.errors import CollectiveError
from meshfold.mesh.group import Group
from meshfold.mesh.recording.flight_recorder import Call

PUSHED_FROM_BYTES = 16 * 2**20
"""Smallest block in bytes that ``transport="auto"`` pushes: during a matmul on an H100 smaller ones are no faster than NCCL's."""


def pushes(transport: str, block_bytes: int, device: torch.device) -> bool:
    """Return True if a collective is to be pushed.

    Args:
        transport: ``"nccl"``: never; ``"push"``: always; ``"auto"``: blocks of a GPU that are large enough.
        block_bytes: what a rank sends to each other one, in bytes.
        device: where it is.
    """
    return transport == "push" or (transport == "auto" and device.type == "cuda" and block_bytes >= PUSHED_FROM_BYTES)


def all_gather_push(x: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """Start gathering along dim 0 by pushes, in parallel with compute: ``[n, ..] -> [g·n, ..]``.

    Where the ranks cannot push to each other it is the ordinary all-gather, on all of them.

    Args:
        x: contiguous; it may be this rank's block of ``out``. It must not change before the result has been waited for.
        group: all of its ranks must call.
        out: contiguous; written when the result has been waited for. By default a new tensor.

    Raises:
        CollectiveError: if the size of ``out`` is not exactly that of all ranks' blocks, or x is not contiguous.
    """
    whole = (group.size * x.shape[0], *x.shape[1:])
    if not x.is_contiguous():
        raise CollectiveError(
            f"all_gather_push of {tuple(x.shape)}: strides {x.stride()} are not contiguous; pass x.contiguous()"
        )
    if out is None:
        out = x.new_empty(whole)
    found = channel(group, x.device) if group.size > 1 else None
    if found is None or x.numel() == 0 or out.shape != whole or out.dtype != x.dtype:
        return all_gather_into(out, x, group)
    call = note_call("all_gather", group, x, times=group.size, detail=0, later=True)
    transport, elements = found.transport, x.numel()
    own_is_there = out.data_ptr() + group.index * elements * x.element_size() == x.data_ptr()
    to, come_from = tuple(targets(group.index, group.size)), tuple(sources(group.index, group.size))
    with _waits_now(call, x), _Streams(transport) as streams:
        for start, stop in _pieces(found, elements, x.element_size()):
            exchange = found.begin((stop - start,), x.dtype)
            with transport.on("send"):
                for target in to:
                    exchange.write(target, x, start)
            with transport.on("receive"):
                if start == 0 and not own_is_there:
                    transport.copy(x, out, group.index * x.numel() * x.element_size())
                for source in come_from:
                    exchange.read(source, out, source * elements + start)
                exchange.release()
    return Pending(out, streams.join, waits=False, call=call if x.is_cuda else None, keep=x)


def reduce_scatter_push(x: Tensor, group: Group, *, dtype: torch.dtype | None = None) -> Pending:
    """Start summing over the group by pushes, in parallel with compute: this rank's block along dim 0, ``[g·n, ..] -> [n, ..]``.

    Each rank pushes its part of a block to the block's rank, in the dtype of x. That rank sums the parts in float32 (float64 parts
    in float64), in the order of the ranks, and rounds once. Where the ranks cannot push to each other it is the ordinary
    reduce-scatter, on all of them.

    Args:
        x: contiguous. It must not change before the result has been waited for.
        group: all of its ranks must call.
        dtype: of the result; by default the dtype of x.

    Raises:
        CollectiveError: if the group's size does not divide dim 0, or x is not contiguous.
    """
    return _reduce_scatter(x, group, dtype, squares=False)[0]


def reduce_scatter_push_squares(
    x: Tensor | Sequence[Tensor], group: Group, *, dtype: torch.dtype | None = None
) -> tuple[Pending, Tensor | None]:
    """Start the sum of :func:`reduce_scatter_push`, and the sums of its squares in the same pass.

    Args:
        x: contiguous; or contiguous tensors of one dtype, which stand for one flat tensor of their elements: they are pushed from
            where they are. None must change before the result has been waited for.
        group: all of its ranks must call, with as many elements.
        dtype: of the result; by default the dtype of x.

    Returns:
        The sum, and for every 65,536 elements of it their squares, added up in float64 in the order of
        ``meshfold.kernels.sum_of_squares``: complete once the sum has been waited for. None where nothing was measured:
        the ranks cannot push to each other, or the result's squares are not exact in float64.
    """
    if isinstance(x, Tensor):
        return _reduce_scatter(x, group, dtype, squares=True)
    # A tensor without memory of its own has the size for whoever records the call.
    stands_for = x[0].new_empty(1).expand(sum(run.numel() for run in x))
    found = channel(group, stands_for.device) if group.size > 1 else None
    if found is None:
        return _reduce_scatter(torch.cat([run.reshape(-1) for run in x]), group, dtype, squares=True)
    return _reduce_scatter(stands_for, group, dtype, squares=True, runs=x)


def _reduce_scatter(
    x: Tensor, group: Group, dtype: torch.dtype | None, *, squares: bool, runs: Sequence[Tensor] = ()
) -> tuple[Pending, Tensor | None]:
    """See :func:`reduce_scatter_push_squares`; ``runs``: hold the elements of ``x``, which has only their number and dtype."""
    if x.shape[0] % group.size or not all(each.is_contiguous() for each in runs or [x]):
        raise CollectiveError(
            f"reduce_scatter_push of {tuple(x.shape)} with strides {x.stride()} over {group.size} ranks: dim 0 must be a multiple "
            f"of {group.size}, and the tensor contiguous; pass x.contiguous()"
        )
    found = channel(group, x.device) if group.size > 1 else None
    if found is None or x.numel() == 0:
        wide = x if dtype is None else x.to(dtype)
        return reduce_scatter(wide, group, 0, async_op=True), None
    call = note_call("reduce_scatter", group, x, detail=0, later=True)
    elements, laid = x.numel() // group.size, _Laid(runs or [x])
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]), dtype=dtype or x.dtype)
    flat, transport, own = out.view(-1), found.transport, group.index * elements
    to = tuple(targets(group.index, group.size))
    measured: Tensor | None = None
    together = SQUARED_TOGETHER if squares and has_exact_squares(out.dtype) else 1
    pieces = _pieces(found, elements, x.element_size(), together)
    if together > 1 and all(start % together == 0 for start, _ in pieces):
        measured = x.new_empty(-(-elements // together), dtype=torch.float64)
    with _waits_now(call, x), _Streams(transport) as streams:
        for start, stop in pieces:
            exchange = found.begin((stop - start,), x.dtype)
            with transport.on("send"):
                for target in to:
                    exchange.write_runs(target, laid.cut(target * elements + start, stop - start))
            with transport.on("receive"):
                mine = laid.whole(own + start, stop - start)
                if mine is None:
                    exchange.write_runs(group.index, laid.cut(own + start, stop - start))
                exchange.arrive()
                sum_parts(
                    exchange.blocks(),
                    exchange.blocks()[group.index] if mine is None else mine,
                    group.index,
                    flat[start:stop],
                    squares=None if measured is None else measured[start // together : -(-stop // together)],
                    stream=transport.handle(),
                )
                exchange.release()
    return Pending(out, streams.join, waits=False, call=call if x.is_cuda else None, keep=laid), measured


class _Laid:
    """A flat tensor whose elements lie in runs of memory, one after the other."""

    def __init__(self, runs: Sequence[Tensor]) -> None:
        self._runs = [run.view(-1) for run in runs]
        self._ends = [*accumulate(run.numel() for run in self._runs)]

    def cut(self, first: int, elements: int) -> Iterator[tuple[Tensor, int, int]]:
        """Yield where some elements lie: memory, the first element in it, and how many."""
        place = bisect_right(self._ends, first)
        while elements:
            run, end = self._runs[place], self._ends[place]
            count = min(elements, end - first)
            if count:
                yield run, run.numel() - (end - first), count
            first, elements, place = first + count, elements - count, place + 1

    def whole(self, first: int, elements: int) -> Tensor | None:
        """Return elements that lie in one run; None if they do not."""
        (run, start, count), *_ = self.cut(first, elements)
        return run[start : start + count] if count == elements else None


class _Streams:
    """A call on the two streams of a transport: they begin after what the current stream has now.

    Once a call, not once a piece: the host queues nothing else on the current stream meanwhile.
    """

    __slots__ = ("_points", "_transport")

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._points: list[torch.cuda.Event | None] = []

    def __enter__(self) -> _Streams:
        self._transport.follow(*STREAMS)
        return self

    def __exit__(self, *error: object) -> None:
        for stream in STREAMS:
            with self._transport.on(stream):
                self._points.append(self._transport.mark())

    def join(self, result: Tensor) -> Tensor:
        """Let the current stream wait for the result, and for the pushes: then the memory of what was sent may be reused."""
        for point in self._points:
            self._transport.after(point)
        return result


def _waits_now(call: Call | None, x: Tensor) -> AbstractContextManager[None]:
    """Return the context in which a CPU pushes, which waits at once; on a GPU the wait comes later."""
    return nullcontext() if call is None or x.is_cuda else call


def _pieces(found: Channel, elements: int, size: int, together: int = 1) -> list[tuple[int, int]]:
    """Return (first, one past the last) of each piece when elements are cut into pieces of about equal size.

    Where a channel has the room for them, elements that are ``together`` are in one piece.
    """
    most = found.block_bytes // size
    unit = together if together <= most else 16
    pieces = -(-elements // most)
    each = -(-elements // pieces)
    each = min(most // unit * unit or most, -(-each // unit) * unit)
    return [(start, min(start + each, elements)) for start in range(0, elements, each)]
