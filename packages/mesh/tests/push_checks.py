"""Checks of pushes on whatever device the ranks have, each against the collectives of torch or a sum in float32.

Run as a program on ranks (``meshfold run --ranks 2 packages/mesh/tests/push_checks.py``) it does all of them.
"""

from __future__ import annotations

import random
import sys
import time

import torch
from torch import Tensor

from meshfold.mesh import Mesh, all_gather, barrier, reduce_scatter
from meshfold.mesh.collectives import push
from meshfold.mesh.group import Group
from meshfold.mesh.processes import process_group
from meshfold.mesh.watchdog.monitor import watch


def numbers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def can_push(group: Group, device: torch.device) -> None:
    """The ranks reach each other: otherwise all other checks would compare a collective with itself."""
    reason = push.why_not(group, device)
    assert reason == "", reason


def gathers(group: Group, device: torch.device) -> None:
    """All-gathers of many sizes have the bits of the ordinary one, several of them under way at once."""
    sizes = (1, 7, 1000, 2**16 + 8, 3 * 2**20 + 24, 40 * 2**20)
    for seed, size in enumerate(sizes):
        x = numbers((size,), torch.bfloat16, device, 10 * seed + group.index)
        pending = [push.all_gather_push(x, group) for _ in range(3)]
        wanted = all_gather(x, group, 0)
        for one in reversed(pending):
            assert torch.equal(one.wait(), wanted), f"{size} elements"
    whole = torch.full((group.size * 12,), -1.0, device=device)
    own = whole[12 * group.index : 12 * group.index + 12].fill_(float(group.index))
    push.all_gather_push(own, group, whole).wait()
    assert torch.equal(whole, torch.arange(group.size, device=device).float().repeat_interleave(12))


def sums(group: Group, device: torch.device) -> None:
    """Reduce-scatters are the float32 sum of the ranks' parts, rounded once, bit for bit; their squares are exact."""
    for seed, size in enumerate((1, 9, 4097, 2**18 + 8, 20 * 2**20)):
        for dtype in (torch.bfloat16, torch.float32):
            shape = (group.size * size,)
            parts = [numbers(shape, dtype, device, 100 * seed + rank) for rank in range(group.size)]
            total = torch.zeros(shape, dtype=torch.float32, device=device)
            for part in parts:
                total += part
            wanted = total.chunk(group.size)[group.index]
            mine = parts[group.index]
            assert torch.equal(push.reduce_scatter_push(mine, group).wait(), wanted.to(dtype)), (size, dtype)
            assert torch.equal(push.reduce_scatter_push(mine, group, dtype=torch.float32).wait(), wanted), size
            pending, squares = push.reduce_scatter_push_squares(mine, group, dtype=torch.float32)
            assert torch.equal(pending.wait(), wanted) and squares is not None, (size, dtype)
            for block, part in zip(squares, wanted.double().square().split(65536), strict=True):
                torch.testing.assert_close(block, part.sum(), rtol=1e-13, atol=0.0)
            near = reduce_scatter(mine, group, 0).float()
            assert float((near - wanted).abs().max()) < 0.1, "the ordinary reduce-scatter sums something else"


def races(group: Group, device: torch.device, calls: int = 200) -> None:
    """Many calls of random sizes, with delays of hosts and devices that differ between ranks, lose no block."""
    same, own = random.Random(7), random.Random(group.index)
    bad = torch.zeros((), device=device)
    for call in range(calls):
        size, kind = same.choice((5, 3000, 2**18, 2**22)), same.randrange(2)
        if own.random() < 0.1:
            time.sleep(own.random() * 0.01)
        if device.type == "cuda" and own.random() < 0.2:
            torch.cuda._sleep(own.randrange(1_000_000))
        if kind:
            found = push.all_gather_push(torch.full((size,), float(call % 100 + group.index), device=device), group)
            wanted = (call % 100 + torch.arange(group.size, device=device)).float()
            bad += (found.wait().view(group.size, size) != wanted[:, None]).any()
        else:
            blocks = torch.arange(group.size, device=device).float() + call % 100 + group.index
            found = push.reduce_scatter_push(blocks.repeat_interleave(size), group)
            total = sum(call % 100 + group.index + rank for rank in range(group.size))
            bad += (found.wait() != total).any()
    assert float(bad) == 0


CHECKS = (can_push, gathers, sums, races)


def main() -> int:
    """Run every check on this rank; print a line for each on rank 0."""
    world = process_group.start()
    watch(30.0)
    device = world.device
    group = Mesh({"tensor": world.world_size}).group("tensor")
    for check in CHECKS:
        begun = time.perf_counter()
        check(group, device)
        barrier(group, device)
        if group.index == 0:
            print(f"{check.__name__}: right on {group.size} ranks, {time.perf_counter() - begun:.2f} s", flush=True)
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
