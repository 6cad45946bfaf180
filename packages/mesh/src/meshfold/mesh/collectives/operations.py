"""The collectives: with the calls beneath them (issue.py) the one place that talks to torch.distributed.

Each returns a new tensor, does not change its input, and can be traced by torch.compile (:mod:`meshfold.mesh.collectives.issue`).
None of them is differentiable: see :mod:`meshfold.mesh.collectives.primitives` for the pairs with adjoints. A group of one rank
never communicates and returns its input.

With ``async_op=True`` a call returns a :class:`Pending` at once; other work may be queued before ``.wait()``.
On a GPU waiting blocks the stream, never the host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from meshfold.mesh.collectives import issue
from meshfold.mesh.collectives.issue import Issued
from meshfold.mesh.collectives.wide_copies import wide_contiguous, wide_reshape
from meshfold.mesh.errors import CollectiveError
from meshfold.mesh.group import Group
from meshfold.mesh.recording import comm_log, flight_recorder
from meshfold.mesh.recording.comm_log import Kind
from meshfold.mesh.recording.flight_recorder import Call

_ops = torch.ops._c10d_functional
_resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]


class Pending:
    """A collective in flight: ``wait()`` returns the tensor, and may be called several times."""

    __slots__ = ("_call", "_finish", "_keep", "_tensor", "_waits", "_work")

    def __init__(
        self,
        tensor: Tensor,
        finish: Callable[[Tensor], Tensor] | None,
        *,
        waits: bool = True,
        work: Any = None,
        call: Call | None = None,
        keep: object = None,
    ) -> None:
        """Args:
        tensor: the collective's output, or the result itself if there is nothing to finish.
        finish: turns the output into the result.
        waits: the caller must wait for the tensor; if False, ``finish`` waits.
        work: to wait for; None: the output is a functional collective's.
        call: for the watchdog, if there is one.
        keep: has memory that is needed until the wait.
        """
        self._tensor = tensor
        self._finish = finish
        self._waits = waits
        self._work = work
        self._call = call
        self._keep = keep

    def wait(self) -> Tensor:
        """Return the result, ordered after the collective on the current stream."""
        if self._finish is not None:
            if self._call is None or torch.compiler.is_compiling():
                self._tensor = self._finish(self._arrived())
            else:
                with self._call:
                    self._tensor = self._finish(self._arrived())
                self._call = None
            self._finish = self._keep = self._work = None
        return self._tensor

    def _arrived(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            return self._tensor
        arrived: Tensor = _ops.wait_tensor(self._tensor) if self._waits else self._tensor
        return arrived


@overload
def all_reduce(
    x: Tensor, group: Group, op: str = ..., *, async_op: Literal[False] = ..., own: bool = ...
) -> Tensor: ...
@overload
def all_reduce(x: Tensor, group: Group, op: str = ..., *, async_op: Literal[True], own: bool = ...) -> Pending: ...
def all_reduce(
    x: Tensor, group: Group, op: str = "sum", *, async_op: bool = False, own: bool = False
) -> Tensor | Pending:
    """Return the sum (or ``"max"``, ``"min"``) over the group, the same bits on every rank. Shape unchanged.

    ``own``: nobody else reads ``x``, so it may be written instead of a copy; it is worth nothing afterwards.
    """
    if group.size == 1:
        return _ready(x, async_op)
    call = note_call("all_reduce", group, x, detail=op, later=async_op)
    return _issue(issue.all_reduce(x, op, group, own=own), _same, async_op, call)


@overload
def all_gather(x: Tensor, group: Group, dim: int = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def all_gather(x: Tensor, group: Group, dim: int = ..., *, async_op: Literal[True]) -> Pending: ...
def all_gather(x: Tensor, group: Group, dim: int = 0, *, async_op: bool = False) -> Tensor | Pending:
    """Return every rank's block, concatenated along ``dim`` in group order: ``[.., n, ..] -> [.., g·n, ..]``."""
    if group.size == 1:
        return _ready(x, async_op)
    dim = dim % x.dim()
    shape, size = x.shape, group.size
    call = note_call("all_gather", group, x, times=size, detail=dim, later=async_op)
    if _leads_in_memory(x, dim):
        turned = x.movedim(dim, 0)
        gathered = issue.all_gather(turned, group)
        rest = turned.shape[1:]
        return _issue(gathered, lambda out: out.view(size * shape[dim], *rest).movedim(0, dim), async_op, call)
    gathered = issue.all_gather(wide_contiguous(x), group)
    if dim == 0 and not torch.compiler.is_compiling():  # see traceable_result
        return _issue(gathered, _same, async_op, call)
    whole = (*shape[:dim], size * shape[dim], *shape[dim + 1 :])

    def finish(out: Tensor) -> Tensor:
        if math.prod(shape[:dim]) == 1:  # the blocks are already contiguous: no copy
            return out.view(whole)
        return wide_reshape(out.view(size, *shape).movedim(0, dim), whole)

    return _issue(gathered, finish, async_op, call)


def all_gather_into(out: Tensor, x: Tensor, group: Group) -> Pending:
    """Gather along dim 0 as :func:`all_gather` does, into ``out``: ``[n, ..] -> [g·n, ..]``.

    Args:
        out: contiguous; written when the result has been waited for.
        x: contiguous; it may be this rank's block of ``out``.

    Raises:
        CollectiveError: if the size of ``out`` is not exactly the sum of all ranks' blocks.
    """
    if out.shape != (group.size * x.shape[0], *x.shape[1:]) or out.dtype != x.dtype:
        raise CollectiveError(
            f"all_gather_into: {group.size} blocks of {tuple(x.shape)} {x.dtype} do not make {tuple(out.shape)} {out.dtype}"
        )
    if group.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Pending(out, None)
    call = note_call("all_gather", group, x, times=group.size, detail=0, later=True)
    gathered, work = issue.all_gather_into(out, x, group)
    return Pending(gathered, _same, work=work, call=call)


@overload
def reduce_scatter(x: Tensor, group: Group, dim: int = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def reduce_scatter(x: Tensor, group: Group, dim: int = ..., *, async_op: Literal[True]) -> Pending: ...
def reduce_scatter(x: Tensor, group: Group, dim: int = 0, *, async_op: bool = False) -> Tensor | Pending:
    """Return this rank's block along ``dim`` of the sum over the group: ``[.., g·n, ..] -> [.., n, ..]``.

    Raises:
        CollectiveError: if the group's size does not divide the dim.
    """
    if group.size == 1:
        return _ready(x, async_op)
    dim = dim % x.dim()
    shape, size = x.shape, group.size
    if shape[dim] % size:
        raise CollectiveError(
            f"reduce_scatter of {tuple(shape)} along dim {dim}: {size} ranks do not divide {shape[dim]}"
        )
    call = note_call("reduce_scatter", group, x, detail=dim, later=async_op)
    if _leads_in_memory(x, dim):
        scattered = issue.reduce_scatter(x.movedim(dim, 0), group)
        return _issue(scattered, lambda out: out.movedim(0, dim), async_op, call)
    if dim == 0 and not torch.compiler.is_compiling():  # see traceable_result
        return _issue(issue.reduce_scatter(x.contiguous(), group), _same, async_op, call)
    block = (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])
    if math.prod(shape[:dim]) == 1:
        stacked = x.contiguous().view(size, *block)
    else:
        stacked = wide_contiguous(x.reshape(*shape[:dim], size, *block[dim:]).movedim(dim, 0))
    scattered = issue.reduce_scatter(stacked, group)
    return _issue(scattered, lambda out: out.view(block), async_op, call)


def reduce_scatter_inside(x: Tensor, group: Group) -> Pending:
    """Reduce-scatter along dim 0 a tensor that is not needed afterwards; allocate no result where possible.

    Where the back end supports it (NCCL), the result is this rank's block of ``x``, which is overwritten.

    Args:
        x: contiguous, dim 0 a multiple of the group's size.
    """
    if group.size == 1 or not x.is_cuda or torch.compiler.is_compiling():
        return reduce_scatter(x, group, async_op=True)
    call = note_call("reduce_scatter", group, x, detail=0, later=True)
    rows = x.shape[0] // group.size
    block = x[group.index * rows : (group.index + 1) * rows]
    block, work = issue.reduce_scatter_into(block, x, group)
    return Pending(block, _same, work=work, call=call)


@overload
def all_to_all(
    x: Tensor, group: Group, split_dim: int, concat_dim: int, *, async_op: Literal[False] = ...
) -> Tensor: ...
@overload
def all_to_all(x: Tensor, group: Group, split_dim: int, concat_dim: int, *, async_op: Literal[True]) -> Pending: ...
def all_to_all(x: Tensor, group: Group, split_dim: int, concat_dim: int, *, async_op: bool = False) -> Tensor | Pending:
    """Move the split from one dim to another: block ``j`` along ``split_dim`` goes to rank ``j``. Arriving blocks are
    concatenated along ``concat_dim`` in group order.

    Raises:
        CollectiveError: if the group's size does not divide ``split_dim``.
    """
    if group.size == 1:
        return _ready(x, async_op)
    split, concat = split_dim % x.dim(), concat_dim % x.dim()
    shape, size = x.shape, group.size
    if shape[split] % size:
        raise CollectiveError(
            f"all_to_all of {tuple(shape)} along dim {split}: {size} ranks do not divide {shape[split]}"
        )
    call = note_call("all_to_all", group, x, detail=(split, concat), later=async_op)
    block = (*shape[:split], shape[split] // size, *shape[split + 1 :])
    stacked = wide_contiguous(x.reshape(*shape[:split], size, *block[split:]).movedim(split, 0))
    ones = [1] * size
    exchanged = issue.all_to_all(stacked, ones, ones, group)
    whole = (*block[:concat], size * block[concat], *block[concat + 1 :])
    return _issue(exchanged, lambda out: wide_reshape(out.movedim(0, concat), whole), async_op, call)


def exchange_rows(x: Tensor, group: Group, sends: Sequence[int], receives: Sequence[int]) -> Pending:
    """Start sending each rank its own number of rows: ``[sum(sends), ..] -> [sum(receives), ..]``, sources in group order.

    Args:
        x: the rows for rank 0 of the group, then those for rank 1, and so on.
        sends: rows for each rank; those for this rank itself are copied and count as no traffic.
        receives: number of rows that each rank sends here.

    Raises:
        CollectiveError: if there is not one number a rank, or ``sends`` are not the rows of ``x``.
    """
    if len(sends) != group.size or len(receives) != group.size or sum(sends) != x.shape[0]:
        raise CollectiveError(
            f"exchange_rows of {tuple(x.shape)} over {group.size} ranks: sends {list(sends)} must have a number for each "
            f"rank and sum to {x.shape[0]} rows, receives {list(receives)} a number for each rank"
        )
    if group.size == 1:
        return Pending(x, None)
    # The number of rows may differ between ranks, so compare only the rest of the shape.
    away = x[: x.shape[0] - sends[group.index]]
    if comm_log._active:
        comm_log.note("exchange_rows", group.axes, group.size, away.numel() * x.element_size())
    call = None
    if flight_recorder.active is not None and not torch.compiler.is_compiling():
        call = flight_recorder.active.enter("exchange_rows", group, x[:0], None, None, now=False)
    exchanged, work = issue.all_to_all(x.contiguous(), list(receives), list(sends), group)
    return Pending(exchanged, _same, work=work, call=call)


@overload
def broadcast(x: Tensor, group: Group, source: int, *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def broadcast(x: Tensor, group: Group, source: int, *, async_op: Literal[True]) -> Pending: ...
def broadcast(x: Tensor, group: Group, source: int, *, async_op: bool = False) -> Tensor | Pending:
    """Return the tensor of the rank with index ``source`` in the group; the others pass one of the same shape and dtype."""
    if group.size == 1:
        return _ready(x, async_op)
    call = note_call("broadcast", group, x, detail=source, later=async_op)
    return _issue(issue.broadcast(x, source, group), _same, async_op, call)


@overload
def shift(x: Tensor, group: Group, steps: int = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
@overload
def shift(x: Tensor, group: Group, steps: int = ..., *, async_op: Literal[True]) -> Pending: ...
def shift(x: Tensor, group: Group, steps: int = 1, *, async_op: bool = False) -> Tensor | Pending:
    """Send to the rank ``steps`` further round the ring of the group, receive from the one ``steps`` before."""
    size = group.size
    if size == 1 or steps % size == 0:
        return _ready(x, async_op)
    call = note_call("shift", group, x, detail=steps, later=async_op)
    # A point-to-point exchange as an all-to-all with all blocks but one empty: the same messages, and unlike isend/irecv it
    # can be traced.
    sends, receives = [0] * size, [0] * size
    sends[(group.index + steps) % size] = receives[(group.index - steps) % size] = x.numel()
    moved = issue.all_to_all(x.contiguous().view(-1), receives, sends, group)
    shape = x.shape
    return _issue(moved, lambda out: out.view(shape), async_op, call)


class Transfer(Pending):
    """A tensor in flight between two ranks; it is kept until ``wait()`` returns or ``done`` is true."""

    __slots__ = ()

    def __init__(self, tensor: Tensor, work: Any, call: Call | None = None) -> None:
        super().__init__(tensor, _same, work=work, call=call)

    def _arrived(self) -> Tensor:
        # Gloo ignores the group's timeout when it receives; with NCCL a timeout here would block the host.
        if flight_recorder.limit is None or self._tensor.is_cuda:
            self._work.wait()
        else:
            self._work.wait(flight_recorder.limit)
        return self._tensor

    @property
    def done(self) -> bool:
        """True if the transfer is complete, so that the sent memory may be reused; does not wait."""
        return self._finish is None or bool(self._work.is_completed())


def send(x: Tensor, group: Group, target: int) -> Transfer:
    """Send a tensor to the rank with index ``target`` in the group, which must :func:`receive` one of its shape and dtype.

    Messages from one rank to another over one group arrive in the order in which they were sent. On a GPU one direction must not
    wait for the other: give each a group of its own (:meth:`meshfold.mesh.Mesh.channel`).
    """
    call = note_call("send", group, x, peer=group.ranks[target], later=True)
    whole = x.contiguous()
    work = _begun(call, lambda: dist.isend(whole, group=_resolve(group.name), group_dst=target))
    return Transfer(whole, work, call)


def receive(out: Tensor, group: Group, source: int) -> Transfer:
    """Receive from the rank with index ``source`` in the group into ``out``, which is contiguous."""
    call = None
    if flight_recorder.active is not None and not torch.compiler.is_compiling():
        call = flight_recorder.active.enter("receive", group, out, None, group.ranks[source], now=False)
    work = _begun(call, lambda: dist.irecv(out, group=_resolve(group.name), group_src=source))
    return Transfer(out, work, call)


def barrier(group: Group, device: torch.device | str = "cpu") -> None:
    """Wait until every rank of the group has called."""
    token = all_reduce(torch.zeros(1, device=device), group)
    if token.is_cuda:
        torch.cuda.synchronize(token.device)


def _begun(call: Call | None, start: Callable[[], Any]) -> Any:
    """Start the transfer of a message; gloo raises here if the other side has exited."""
    try:
        return start()
    except RuntimeError as error:
        if call is None:
            raise
        raise call.failed(error) from None


def _issue(issued: Issued, finish: Callable[[Tensor], Tensor], async_op: bool, call: Call | None) -> Tensor | Pending:
    tensor, work = issued
    if work is not None and call is None and not async_op:
        work.wait()
        return finish(tensor)
    pending = Pending(tensor, finish, work=work, call=call)
    return pending if async_op else pending.wait()


def _ready(x: Tensor, async_op: bool) -> Tensor | Pending:
    return Pending(x, None) if async_op else x


def _same(x: Tensor) -> Tensor:
    return x


def _leads_in_memory(x: Tensor, dim: int) -> bool:
    """Return True if this dim, not the first, is outermost in memory (a transposed tensor): its blocks then need no copy."""
    return dim > 0 and not x.is_contiguous() and x.movedim(dim, 0).is_contiguous()


def note_call(
    kind: Kind,
    group: Group,
    x: Tensor,
    times: int = 1,
    *,
    detail: object = None,
    peer: int | None = None,
    later: bool,
) -> Call | None:
    """Report a collective to the recorder and the watchdog, if active; ``later``: it is awaited later."""
    on_meta = not group.name  # of a MetaMesh, which sends nothing
    if comm_log._active:
        comm_log.note(kind, group.axes, group.size, times * x.numel() * x.element_size(), on_meta=on_meta)
    if on_meta:
        return None
    if torch.compiler.is_compiling() or flight_recorder.active is None:
        return None
    return flight_recorder.active.enter(kind, group, x, detail, peer, now=not later)


def all_gather_object(mine: Any, group: Group, device: torch.device) -> list[Any]:
    """Return every rank's object, in group order. All ranks of the group must call."""
    words = json.dumps(mine).encode()
    if group.size == 1:  # skip the device, which may be busy
        return [json.loads(words)]
    text = torch.frombuffer(bytearray(words), dtype=torch.uint8).to(device)
    longest = int(all_reduce(torch.tensor([text.numel()], device=device), group, "max"))
    padded = torch.full((1, longest), ord(" "), dtype=torch.uint8, device=device)
    padded[0, : text.numel()] = text
    return [json.loads(row.numpy().tobytes()) for row in all_gather(padded, group, 0).cpu()]
