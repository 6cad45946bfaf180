"""The rows that this data coordinate is given: cut from a global batch, or compared with those of the other data ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshfold.engine.batches.batch import Batch
from meshfold.engine.batches.sharding import shard_batch
from meshfold.engine.world import World
from meshfold.mesh import SpecError, all_gather
from meshfold.mesh.processes import is_simulated

_AT_ONCE = 2**22
"""Elements of a tensor that are compared at once, which bounds the memory that this takes"""

_INTEGER_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GivenRows:
    """This data coordinate's part of global batches.

    A batch that the engine has not cut is compared once between the data ranks: a loader that does not know of ranks gives all of
    them the same rows, so that they would compute one gradient many times. Batches of one number everywhere, as for a trial, may be
    the same.
    """

    def __init__(self, world: World) -> None:
        """``world``: the ranks."""
        self._world = world
        self._settled = world.row_size == 1 or world.device.type == "meta" or is_simulated()

    def cut(self, global_batch: Any) -> Any:
        """Return this data coordinate's rows of a global batch; see :func:`meshfold.engine.batches.sharding.shard_batch`."""
        return shard_batch(global_batch, *self.part())

    def part(self) -> tuple[int, int]:
        """Return this coordinate's number and how many there are, for rows that are then not compared."""
        self.trust()
        return self._world.row_index, self._world.row_size

    def trust(self) -> None:
        """Compare no batches: the program cuts them itself, or gives all ranks the same on purpose."""
        self._settled = True

    def check(self, work: Batch, *, complete: bool) -> None:
        """Compare the first batch with those of the other data ranks; all must call.

        Args:
            work: the batch.
            complete: it is all that the loss depends on. Inputs alone may be the same where targets or the loss differ, so they are
                only warned of.

        Raises:
            SpecError: if all of them have the same complete batch.
        """
        if self._settled:
            return
        self._settled = True
        leaves = tree_leaves((work.args, work.kwargs, work.given))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
        mine = torch.zeros((), dtype=torch.int64, device=self._world.device)
        for tensor in tensors:
            mine = mine * 31 + _fingerprint(tensor).to(mine.device)
        each = all_gather(mine.view(1), self._world.row_group, 0).tolist()
        if len({*each}) == 1 and not all(_is_constant(tensor) for tensor in tensors):
            ranks, given = self._world.row_size, "batch" if complete else "inputs"
            said = (
                f"{self._world.spec.written or self._world.spec}: all {ranks} data ranks were given the same {given}, such as a "
                f"plain DataLoader yields on each of them, and would compute one gradient {ranks} times. Cut it: "
                "engine.train_step(engine.shard_batch(batch)), or let loader = engine.dataloader(dataset, batch_size=...) yield "
                "each rank's rows"
            )
            if complete:
                raise SpecError(said)
            if self._world.row_index == 0:
                warnings.warn(said, stacklevel=2)


def _is_constant(tensor: Tensor) -> bool:
    """Return True if all elements are the same number."""
    return not tensor.numel() or bool((tensor == tensor.reshape(-1)[:1]).all())


def _fingerprint(tensor: Tensor) -> Tensor:
    """Return an int64 scalar that depends on every element and its place."""
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = whole.detach().reshape(-1).view(_INTEGER_OF[whole.element_size()])
    found = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in flat.split(_AT_ONCE):
        places = torch.arange(1, 2 * len(part), 2, device=flat.device)  # odd, so that no bit is lost
        found = found * 31 + (part * places).sum()
    return found
