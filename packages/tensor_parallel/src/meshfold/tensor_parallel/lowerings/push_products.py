"""The products of the push lowering: each multiplies the rows that have arrived while copy engines move the rest.

A gathered operand is multiplied rank by rank, in the order of arrival, this rank's rows first: they need no wait. A scattered
result is computed rank by rank, this rank's rows last: the others' are pushed at the same time. Weight gradients read the gathered
rows where they arrived, as one matrix.

Between two ranks a sum needs no separate kernel. Arriving rows are copied into the result during a product, and the product of this
rank's rows adds to them, in float32 like all sums of a product. That rounds once, and the own part never on its own.

In a compiled graph each is one operation, which the compiler does not look into.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshfold.mesh import Group, collectives
from meshfold.mesh.collectives.push import Channel, Exchange, channel, sources, sum_parts, targets
from meshfold.mesh.recording import unrecorded

_groups: dict[str, Group] = {}


def remember(group: Group) -> None:
    """Make a group known to the operations of compiled graphs, which get its name."""
    _groups[group.name] = group


def gather_product(open_channel: Channel, x: Tensor, b: Tensor) -> Tensor:
    """Compute ``gathered(x) b``: ``[m, k], [k, n] -> [g·m, n]``."""
    exchange = _sent_to_others(open_channel, x)
    y = _products_on_arrival(open_channel, exchange, x, b)
    _end(open_channel, exchange)
    return y


def scatter_product(open_channel: Channel, x: Tensor, b: Tensor) -> Tensor:
    """Compute the rows of this rank of the sum of ``x b`` over ranks: ``[g·m, k], [k, n] -> [m, n]``."""
    if open_channel.size == 2:
        return _scatter_between_two(open_channel, x, b)
    exchange, own, parts = _sent_products(open_channel, x, b)
    y = _sum(open_channel, exchange, own)
    del parts
    return y


def _scatter_between_two(open_channel: Channel, x: Tensor, b: Tensor) -> Tensor:
    """Compute :func:`scatter_product` in halves of the rows: while the second half is multiplied, the first arrives."""
    blocks = x.view(2, -1, x.shape[1])
    y = x.new_empty(blocks.shape[1], b.shape[1])
    halves, coming, parts = _halves(y), [], []
    for rows, to in zip(_halves(blocks[1 - open_channel.index]), halves, strict=True):
        parts.append(torch.mm(rows, b))
        coming.append(_exchanged(open_channel, parts[-1], to))
    for one, rows, to in zip(coming, _halves(blocks[open_channel.index]), halves, strict=True):
        _add_product(open_channel, one, rows, b, to)
    return y


def column_gradients(
    open_channel: Channel, x: Tensor, w: Tensor, dy: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute dx and dw of ``y = gathered(x) wᵀ`` from ``x [m, k]``, ``w [n, k]`` and ``dy [g·m, n]``.

    x is gathered during the product of dx, and dx is sent during the product of dw.
    """
    dx = dw = None
    if open_channel.size == 2 and not wants[1]:
        return scatter_product(open_channel, dy, w), None
    coming = _sent_to_all(open_channel, x) if wants[1] else None
    if wants[0] and open_channel.size == 2:
        blocks = dy.view(2, -1, dy.shape[1])
        part = torch.mm(blocks[1 - open_channel.index], w)
        dx = torch.empty_like(x)
        arriving = _exchanged(open_channel, part, dx)
    elif wants[0]:
        exchange, own, parts = _sent_products(open_channel, dy, w)
    if coming is not None:
        dw = dy.t() @ _whole(open_channel, coming)
        _end(open_channel, coming)
    if dx is not None:
        _add_product(open_channel, arriving, blocks[open_channel.index], w, dx)
        del part
    elif wants[0]:
        dx = _sum(open_channel, exchange, own)
        del parts
    return dx, dw


def row_gradients(
    open_channel: Channel, x: Tensor, w: Tensor, dy: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute dx and dw of ``y = scattered(x wᵀ)`` from ``x [g·m, k]``, ``w [n, k]`` and ``dy [m, n]``.

    dy is gathered under the product of dx.
    """
    dx = dw = None
    coming = _sent_to_all(open_channel, dy) if wants[1] else _sent_to_others(open_channel, dy)
    if wants[0]:
        dx = _products_on_arrival(open_channel, coming, dy, w)
    if wants[1]:
        dw = _whole(open_channel, coming).t() @ x
    _end(open_channel, coming)
    return dx, dw


def _sent_to_others(open_channel: Channel, x: Tensor) -> Exchange:
    exchange = open_channel.begin(x.shape, x.dtype)
    for target in targets(open_channel.index, open_channel.size):
        exchange.push(target, x)
    return exchange


def _sent_to_all(open_channel: Channel, x: Tensor) -> Exchange:
    """Send rows to this rank too, where they make one matrix with those that arrive."""
    exchange = _sent_to_others(open_channel, x)
    exchange.push(open_channel.index, x)
    return exchange


def _products_on_arrival(open_channel: Channel, exchange: Exchange, x: Tensor, b: Tensor) -> Tensor:
    y = x.new_empty(open_channel.size, x.shape[0], b.shape[1])
    torch.mm(x, b, out=y[open_channel.index])
    for source in sources(open_channel.index, open_channel.size):
        torch.mm(exchange.await_block(source), b, out=y[source])
    return y.view(-1, b.shape[1])


def _sent_products(open_channel: Channel, x: Tensor, b: Tensor) -> tuple[Exchange, Tensor, list[Tensor]]:
    """Return the exchange that sends the rows of ``x b``, this rank's own rows, and the parts that are being sent."""
    blocks = x.view(open_channel.size, -1, x.shape[1])
    exchange, parts = open_channel.begin((blocks.shape[1], b.shape[1]), x.dtype), []
    for target in targets(open_channel.index, open_channel.size):
        parts.append(torch.mm(blocks[target], b))
        exchange.push(target, parts[-1])
    return exchange, torch.mm(blocks[open_channel.index], b), parts


def _halves(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.chunk(2) if rows.shape[0] % 2 == 0 else (rows,)


class _Arriving(NamedTuple):
    """A call whose block is being copied out, and what waits for that; None on a CPU."""

    exchange: Exchange
    point: torch.cuda.Event | None


def _exchanged(open_channel: Channel, part: Tensor, out: Tensor) -> _Arriving:
    """Send a part to the other of two ranks, and copy its part to ``out`` when it arrives, in parallel with compute.

    The slot is not released yet: that must be done in the order of the calls.
    """
    transport, other = open_channel.transport, 1 - open_channel.index
    exchange = open_channel.begin(part.shape, part.dtype)
    exchange.push(other, part)
    transport.follow("receive")
    with transport.on("receive"):
        exchange.read(other, out)
        return _Arriving(exchange, transport.mark())


def _add_product(open_channel: Channel, arriving: _Arriving, x: Tensor, b: Tensor, out: Tensor) -> None:
    """Add ``x b`` to what has arrived, and end the call."""
    open_channel.transport.after(arriving.point)
    arriving.exchange.release()
    out.addmm_(x, b)
    open_channel.transport.after(arriving.exchange.sent)


def _sum(open_channel: Channel, exchange: Exchange, own: Tensor) -> Tensor:
    exchange.arrive()
    y = torch.empty_like(own)
    parts, stream = exchange.blocks().flatten(1), open_channel.transport.handle()
    sum_parts(parts, own.view(-1), open_channel.index, y.view(-1), stream=stream)
    _end(open_channel, exchange)
    return y


def _whole(open_channel: Channel, exchange: Exchange) -> Tensor:
    """Return all rows at the place where they arrived, including this rank's."""
    exchange.arrive()
    open_channel.transport.after(exchange.sent)
    return exchange.blocks().flatten(0, 1)


def _end(open_channel: Channel, exchange: Exchange) -> None:
    exchange.release()
    open_channel.transport.after(exchange.sent)  # the memory of what was sent may be reused from here on


# -- as operations of compiled graphs ---------------------------------------------------------------------------------


def _channel(group: Group, block: Tensor | tuple[int, torch.dtype], x: Tensor) -> Channel | None:
    elements, dtype = (block.numel(), block.dtype) if isinstance(block, Tensor) else block
    return channel(group, x.device, elements * dtype.itemsize)


@torch.library.custom_op("meshfold::push_gather_product", mutates_args=())
def _gather_product(x: Tensor, w: Tensor, transposed: bool, name: str, ranks: int) -> Tensor:
    group, x, b = _groups[name], x.contiguous(), w.t() if transposed else w
    found = _channel(group, x, x)
    if found is not None:
        return gather_product(found, x, b)
    with unrecorded():
        return collectives.all_gather(x, group, 0) @ b


@_gather_product.register_fake
def _(x: Tensor, w: Tensor, transposed: bool, name: str, ranks: int) -> Tensor:
    return x.new_empty(ranks * x.shape[0], w.shape[0 if transposed else 1])


@torch.library.custom_op("meshfold::push_scatter_product", mutates_args=())
def _scatter_product(x: Tensor, w: Tensor, transposed: bool, name: str, ranks: int) -> Tensor:
    group, x, b = _groups[name], x.contiguous(), w.t() if transposed else w
    found = _channel(group, (x.shape[0] // ranks * b.shape[1], x.dtype), x)
    if found is not None:
        return scatter_product(found, x, b)
    with unrecorded():
        return collectives.reduce_scatter(x @ b, group, 0).clone()


@_scatter_product.register_fake
def _(x: Tensor, w: Tensor, transposed: bool, name: str, ranks: int) -> Tensor:
    return x.new_empty(x.shape[0] // ranks, w.shape[0 if transposed else 1])


@torch.library.custom_op("meshfold::push_gradients", mutates_args=())
def _gradients(
    x: Tensor, w: Tensor, dy: Tensor, column: bool, want_dx: bool, want_dw: bool, name: str, ranks: int
) -> tuple[Tensor, Tensor]:
    group, x, dy = _groups[name], x.contiguous(), dy.contiguous()
    found = _channel(group, x if column else dy, x)
    dx: Tensor | None = None
    dw: Tensor | None = None
    if found is not None:
        dx, dw = (column_gradients if column else row_gradients)(found, x, w, dy, (want_dx, want_dw))
    else:
        with unrecorded():
            whole_x = collectives.all_gather(x, group, 0) if column else x
            whole_dy = dy if column else collectives.all_gather(dy, group, 0)
            if want_dx:
                dx = whole_dy @ w
                dx = collectives.reduce_scatter(dx, group, 0).clone() if column else dx
            dw = whole_dy.t() @ whole_x if want_dw else None
    return x.new_empty(0) if dx is None else dx, x.new_empty(0) if dw is None else dw


@_gradients.register_fake
def _(
    x: Tensor, w: Tensor, dy: Tensor, column: bool, want_dx: bool, want_dw: bool, name: str, ranks: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if want_dx else (0,)), w.new_empty(w.shape if want_dw else (0,))
