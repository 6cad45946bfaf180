"""The two parts of a step of 1D with sequence parallelism: a rank's arithmetic without messages, and the messages alone.

How much of its communication a contestant hides follows from their times::

    hidden = 1 - (the contestant's - the arithmetic's) / the messages'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from meshfold.mesh import Group, Mesh, record
from meshfold.mesh.collectives import all_gather, all_reduce, issue, reduce_scatter
from meshfold.mesh.recording import Entry

OF = "1d+sequence"
ARITHMETIC, MESSAGES = f"{OF} without messages", f"messages of {OF}"
PARTS = (ARITHMETIC, f"{ARITHMETIC} compiled", MESSAGES)
_ADJOINT = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_reduce": "all_reduce"}


@contextmanager
def without_messages() -> Iterator[None]:
    """Context manager: collectives send nothing. What other ranks would send is this rank's own block, so all shapes are right and
    all values of the usual size, on which a GPU's power depends; results are not the contestants'."""

    def gathered(x: Tensor, group: Group) -> issue.Issued:
        return x.repeat(group.size, *[1] * (x.dim() - 1)), None

    def scattered(x: Tensor, group: Group) -> issue.Issued:
        return x[: x.shape[0] // group.size].clone(), None

    def reduced(x: Tensor, op: str, group: Group, *, own: bool = False) -> issue.Issued:
        return (x if own else x.clone()), None

    with ExitStack() as stack:
        for name, made in (("all_gather", gathered), ("reduce_scatter", scattered), ("all_reduce", reduced)):
            stack.enter_context(mock.patch.object(issue, name, made))
        yield


def messages(
    forward: Callable[[], object], mesh: Mesh, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Return a function in place of the forward, which returns its input and sends the messages of forward and backward in turn.

    A backward sends at least the adjoint of each. What it gathers once more instead of keeping it does not count.

    Args:
        forward: runs the blocks, uncompiled, on tensors of ``dtype``.
        mesh: of the blocks.
    """
    with record() as log:
        forward()
    calls = [
        _call(entry, kind, mesh, dtype, device) for entry in log.entries for kind in (entry.kind, _ADJOINT[entry.kind])
    ]

    def send(x: Tensor) -> Tensor:
        for call in calls:
            call()
        return x

    return send


def _call(entry: Entry, kind: str, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that makes a collective of a kind with the block of another call."""
    group = mesh.group(*entry.axes)
    block = torch.randn(entry.block_bytes // dtype.itemsize, device=device).to(dtype)
    if kind == "all_gather":
        mine = block.chunk(group.size)[group.index].clone()
        return lambda: all_gather(mine, group)
    if kind == "reduce_scatter":
        return lambda: reduce_scatter(block, group)
    return lambda: all_reduce(block, group)
