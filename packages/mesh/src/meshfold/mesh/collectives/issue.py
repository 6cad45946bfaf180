"""The beginning of a collective: eagerly a call of its process group, in a trace one of PyTorch's functional collectives.

A functional collective costs the host 5 to 15 µs more than the call beneath it, several times that on a slow host: a Python
function for its autograd (torch 2.13), a look-up by name, a registry of all in flight. The host is what models of many small
collectives wait for, so eager code calls the process group itself: the same messages, on the same streams. A functional one goes to
whatever has to see it: torch.compile, a dispatch mode (a recorder of operators, FakeTensorMode, the tracker of split dims), a
transform of torch.func, a meta tensor, a subclass of Tensor that is no parameter, and autograd if the tensor needs a gradient.

Each function returns the tensor that will hold the result, and the work to wait for. If the work is None, wait for the tensor by
``torch.ops._c10d_functional.wait_tensor``. Inputs are contiguous unless stated otherwise.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor

from meshfold.mesh.collectives.wide_copies import has_memory
from meshfold.mesh.group import Group

Issued: TypeAlias = tuple[Tensor, Any]
"""The tensor of the result, and the work; None: wait for the tensor."""

_ops = torch.ops._c10d_functional
_c10d: Any = dist.distributed_c10d  # Any: its private members are untyped
_resolve = _c10d._resolve_process_group
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
# AOTAutograd of torch 2.11 refuses collectives that write into an argument.
_TRACES_NO_OUT = torch.__version__ < "2.13"


def process_group(x: Tensor, group: Group) -> Any:
    """Return the process group to call for a tensor; None if its collective must be a functional one."""
    if torch.compiler.is_compiling() or _modes() or not has_memory(x) or not (x.is_cuda or x.is_cpu):
        return None
    if (x.requires_grad and torch.is_grad_enabled()) or x.is_complex() or _transforms():
        return None
    return _resolve(group.name)


@cache
def _reduction(op: str) -> Any:
    options = _c10d.AllreduceOptions()
    options.reduceOp = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    return options


@cache
def _source(index: int) -> Any:
    options = _c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = index, 0
    return options


_GATHER, _SCATTER, _EXCHANGE = _c10d.AllgatherOptions(), _c10d.ReduceScatterOptions(), _c10d.AllToAllOptions()


def all_reduce(x: Tensor, op: str, group: Group, *, own: bool = False) -> Issued:
    """Begin a reduction of a tensor of any strides; the result is contiguous.

    The tensor stays as it is, unless it is the caller's ``own``: then it is written, if it is contiguous.
    """
    handle = process_group(x, group)
    if handle is None:
        return _ops.all_reduce(x.contiguous(), op, group.name), None
    out = x if own and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return out, handle.allreduce([out], _reduction(op))


def all_gather(x: Tensor, group: Group) -> Issued:
    """Begin a gather of every rank's block along dim 0: ``[n, ..] -> [g·n, ..]``."""
    handle = process_group(x, group)
    if handle is not None:
        out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
        return out, handle._allgather_base(out, x, _GATHER)
    if x.device.type != "cpu":
        return _ops.all_gather_into_tensor(x, group.size, group.name), None
    if _TRACES_NO_OUT and torch.compiler.is_compiling():  # an all-to-all of equal blocks sends the same messages
        rows = [x.shape[0]] * group.size
        sent = x.repeat(group.size, *[1] * (x.dim() - 1))
        return _ops.all_to_all_single(sent, rows, rows, group.name), None
    # The same collective into our own memory: gloo runs the op above as ALLGATHER_COALESCED and then occasionally corrupts
    # the heap (seen with torch 2.13). When a collective ends, each of a group's two worker threads assigns the collective's
    # name to a shared std::string without a lock. Up to 15 characters are copied in place, but a longer name (of ours, only
    # this one) is on the heap, and both threads may free it.
    return all_gather_into(x.new_empty((group.size * x.shape[0], *x.shape[1:])), x, group)


def all_gather_into(out: Tensor, x: Tensor, group: Group) -> Issued:
    """Begin :func:`all_gather` into a contiguous tensor."""
    handle = process_group(x, group)
    if handle is None or not has_memory(out):
        return _ops.all_gather_into_tensor_out(x, group.size, group.name, out=out), None
    return out, handle._allgather_base(out, x, _GATHER)


def reduce_scatter(x: Tensor, group: Group) -> Issued:
    """Begin a sum of which every rank gets its block along dim 0: ``[g·n, ..] -> [n, ..]``."""
    handle = process_group(x, group)
    if handle is None:
        return _ops.reduce_scatter_tensor(x, "sum", group.size, group.name), None
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    return out, handle._reduce_scatter_base(out, x, _SCATTER)


def reduce_scatter_into(out: Tensor, x: Tensor, group: Group) -> Issued:
    """Begin :func:`reduce_scatter` into a contiguous tensor, which may be this rank's block of ``x`` (NCCL alone)."""
    return out, _resolve(group.name)._reduce_scatter_base(out, x, _SCATTER)


def all_to_all(x: Tensor, receives: list[int], sends: list[int], group: Group) -> Issued:
    """Begin an exchange of rows: so many to each rank, so many from each; ``[sum(sends), ..] -> [sum(receives), ..]``."""
    handle = process_group(x, group)
    if handle is None:
        return _ops.all_to_all_single(x, receives, sends, group.name), None
    out = x.new_empty((sum(receives), *x.shape[1:]))
    return out, handle.alltoall_base(out, x, receives, sends, _EXCHANGE)


def broadcast(x: Tensor, source: int, group: Group) -> Issued:
    """Begin a broadcast of a tensor of any strides, which stays as it is; the result is contiguous."""
    handle = process_group(x, group)
    if handle is None:
        return _ops.broadcast(x.contiguous(), source, group.name), None
    out = x.clone(memory_format=torch.contiguous_format)
    return out, handle.broadcast([out], _source(source))
