"""``python -m meshfold.cli.selftest BACKEND ANSWER``: one rank of the doctor's self-test of collectives."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from meshfold.mesh import (
    CollectiveError,
    Group,
    Mesh,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
    shift,
)
from meshfold.mesh.processes import start

_TIMEOUT_S = 60.0


def main(backend: str, answer: str) -> None:
    """Try every collective; rank 0 writes the names of those with correct results.

    Raises:
        CollectiveError: naming the first one that did not.
    """
    with start(backend=backend, timeout=_TIMEOUT_S) as process:
        group = Mesh({"rank": process.world_size}).group("rank")
        passed = check(group, process.device)
        barrier(group, process.device)
        if process.rank == 0:
            Path(answer).write_text(json.dumps(passed))


def check(group: Group, device: torch.device) -> list[str]:
    """Call each collective on numbers whose result is known; all ranks of the group must call."""
    size, here = group.size, group.index
    mine = torch.arange(size, dtype=torch.float32, device=device) + here * size  # rank r holds r·g .. r·g + g − 1
    every = torch.arange(size * size, dtype=torch.float32, device=device).view(size, size)
    wanted: dict[str, tuple[Tensor, Tensor]] = {
        "all_reduce": (all_reduce(mine, group), every.sum(0)),
        "all_gather": (all_gather(mine, group), every.flatten()),
        "reduce_scatter": (reduce_scatter(mine, group), every.sum(0)[here : here + 1]),
        "all_to_all": (all_to_all(mine, group, 0, 0), every[:, here]),
        "broadcast": (broadcast(mine, group, size - 1), every[size - 1]),
        "shift": (shift(mine, group), every[here - 1]),
    }
    for name, (found, right) in wanted.items():
        if not torch.equal(found, right):
            raise CollectiveError(f"{name} over {size} ranks gave {found.tolist()} instead of {right.tolist()}")
    return list(wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
