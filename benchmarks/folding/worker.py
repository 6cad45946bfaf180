"""One contestant runs blocks of the Evoformer or of ESMFold's trunk for a while, in processes of its own; rank 0 writes JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks.folding.trunk import LONGEST, TRUNK
from benchmarks.peers.absent import AbsentError

Step = Callable[[], Tensor]


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def blocks_of(job: dict[str, Any]) -> nn.ModuleList:
    """Return blocks of AlphaFold's size, divided by ``job["narrower"]``, with random weights of a seed and no dropout."""
    from meshfold.folding import EvoformerBlock

    torch.manual_seed(0)
    small = job["narrower"]
    c_m, c_z = 256 // small, 128 // small
    with device():
        made = [
            EvoformerBlock(c_m, c_z, 32 // small, 32 // small, c_z, 32 // small, 8, 4, 4, 0.0, 0.0)
            for _ in range(job["blocks"])
        ]
        for parameter in nn.ModuleList(made).parameters():
            if parameter.ndim == 2:  # AlphaFold's last layers begin at zero, and zeros draw little power
                nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)
    return nn.ModuleList(made).to(getattr(torch, job["dtype"]))


def ours(job: dict[str, Any], *, kernels: str = "auto", compiled: bool = False) -> Step:
    """Return the step of Meshfold: as many ranks as there are, by ``dap`` or in the grid that the job names."""
    from meshfold.folding import parallelize_folding, sum_gradients
    from meshfold.kernels import use
    from meshfold.mesh import Mesh

    use(kernels)
    blocks = blocks_of(job)
    if "grid" in job:
        parallelize_folding(blocks, Mesh(dict(zip(("row", "col"), job["grid"], strict=True))), "grid")
    elif job["ranks"] > 1:
        parallelize_folding(blocks, Mesh({"axial": job["ranks"]}), "dap")
    return step_of(job, _compiled(blocks, job) if compiled else blocks, lambda: sum_gradients(blocks))


def eager(job: dict[str, Any], *, compiled: bool = False) -> Step:
    """Return the step of OpenFold's attention and triangle modules, which run on one GPU.

    Raises:
        AbsentError: on more than one rank.
    """
    from benchmarks.peers.transformers_folding import eager_block

    if job["ranks"] > 1:
        raise AbsentError("OpenFold's modules run on one GPU")
    blocks = nn.ModuleList(eager_block(block) for block in blocks_of(job))
    return step_of(job, _compiled(blocks, job) if compiled else blocks, lambda: None)


def step_of(job: dict[str, Any], blocks: nn.ModuleList, finish: Callable[[], None]) -> Step:
    """Return forward and backward of all blocks on this rank's part of a sample; the loss is a mean over all of it.

    Args:
        job: with the sizes.
        blocks: called one after the other.
        finish: follows each backward.
    """
    ranks, dtype, small = job["ranks"], getattr(torch, job["dtype"]), job["narrower"]
    generator = torch.Generator().manual_seed(1)
    grid = job.get("grid", (ranks, 1))
    row, column = divmod(int(os.environ.get("RANK", "0")), grid[1])

    def part(rows: int, channels: int) -> Tensor:
        whole = torch.randn(1, rows, job["residues"], channels, generator=generator)
        mine = whole.chunk(grid[0], 1)[row].chunk(grid[1], 2)[column]
        here: Tensor = mine.to(device(), dtype).contiguous()
        return here.requires_grad_()

    m, z = part(job["sequences"], 256 // small), part(job["residues"], 128 // small)
    leaves = [m, z, *blocks.parameters()]

    def step() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        x, y = m, z
        for block in blocks:
            x, y = checkpoint(block, x, y, use_reentrant=False) if job["recompute"] == "blocks" else block(x, y)
        loss = x.float().square().mean() + y.float().square().mean()
        (loss / ranks).backward()
        finish()
        return loss.detach()

    return step


def _compiled(blocks: nn.ModuleList, job: dict[str, Any]) -> nn.ModuleList:
    return nn.ModuleList(torch.compile(block, backend=job["backend"]) for block in blocks)  # type: ignore[misc]


EVOFORMER: dict[str, Callable[[dict[str, Any]], Step]] = {
    "ours": ours,
    "ours, logits in memory": lambda job: ours(job, kernels="reference"),
    "ours, compiled": lambda job: ours(job, compiled=True),
    "OpenFold eager": eager,
    "OpenFold compiled": lambda job: eager(job, compiled=True),
}
"""``ours`` has attention with pair bias by its kernel, ``ours, logits in memory`` by its reference in plain torch."""
CASES = {"evoformer": EVOFORMER, "esmfold": TRUNK, "longest": LONGEST}
"""Contestants of each case."""


if __name__ == "__main__":
    from benchmarks.timed_training import take_device, train_or_absent
    from meshfold.mesh import start

    job = json.loads(sys.argv[1])
    take_device()
    if job["ranks"] > 1:
        start()
    torch._dynamo.config.recompile_limit = 64  # blocks share their code
    train_or_absent(job, CASES[job["case"]][job["contestant"]])
