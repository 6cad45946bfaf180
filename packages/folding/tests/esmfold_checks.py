"""Checks of a split ESMFold on whatever device the ranks have, and its trunk's time and memory beside transformers' own.

Run as a program on ranks: ``meshfold run --ranks 2 packages/folding/tests/esmfold_checks.py``. With ``--time``, it also measures
blocks of ESMFold's sizes at inference: transformers' in chunks of 64 on one rank, and ours under each layout.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))
from esm_models import check_esmfold
from folding_checks import layouts
from transformers.models.esm.configuration_esm import TrunkConfig
from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

from meshfold.folding import EsmFoldStack, MemoryPlanError, parallelize_folding, plan_memory
from meshfold.mesh import Mesh, barrier, start

C_S, C_Z, BLOCKS = 1024, 128, 2
GIB = 1 << 30


def measure(device: torch.device, run: Callable[[], object]) -> str:
    """Return milliseconds a block and the peak of memory, or that it does not fit."""
    gpu = device.type == "cuda"
    try:
        run()
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        run()
        if gpu:
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "does not fit"
    ms = (time.perf_counter() - begin) * 1e3 / BLOCKS
    peak = torch.cuda.max_memory_allocated() / GIB if gpu else 0.0
    return f"{ms:10.1f} ms a block   peak {peak:6.2f} GiB"


def compare(mesh: Mesh, mode: str, residues: int, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return lines for ours whole and in the least chunks; on one rank for transformers' too."""
    torch.manual_seed(0)
    s = torch.randn(1, residues, C_S, device=device, dtype=dtype)
    z = torch.randn(1, residues, residues, C_Z, device=device, dtype=dtype)
    mask, pair_mask = (torch.ones(1, *[residues] * n, device=device, dtype=dtype) for n in (1, 2))
    made = []
    if mesh.world_size == 1:
        config = TrunkConfig(num_blocks=BLOCKS, sequence_state_dim=C_S, pairwise_state_dim=C_Z)
        theirs = [EsmFoldTriangularSelfAttentionBlock(config).to(device, dtype).eval() for _ in range(BLOCKS)]

        def run_theirs() -> object:
            one, two = s, z
            for block in theirs:
                one, two = block(one, two, mask=mask, chunk_size=64)
            return two

        made.append(("transformers, chunks of 64", run_theirs))
    stack = EsmFoldStack(BLOCKS, C_S, C_Z, 32, 32).to(device, dtype).eval()
    sizes = dict(residues=residues, mode=mode, axes=dict(mesh.axes), training=False, dtype=dtype)
    whole = plan_memory(stack, kernels=device.type == "cuda", **sizes)
    measured = set()
    for share in (1.0, 0.7, 0.5, 0.4):
        try:
            plan = plan_memory(stack, kernels=device.type == "cuda", limit=int(whole.bytes * share), **sizes)
        except MemoryPlanError:
            break
        settings = plan.settings
        if settings in measured:
            continue
        measured.add(settings)

        def run_ours(settings: object = settings) -> object:
            parallelize_folding(stack, mesh, mode, memory=settings)
            return stack(s, z, mask, pair_mask)

        made.append((f"ours, {settings}, plan {plan.bytes / GIB:.2f} GiB", run_ours))
    lines = []
    for name, run in made:
        with torch.no_grad():
            lines.append(f"{residues:>5} {mode:<5} {dict(mesh.axes)!s:<22} {name:<55} {measure(device, run)}")
    return lines


def main() -> None:
    """Check, and measure if asked to."""
    with start() as process:
        device, world = process.device, process.world_size
        everyone = Mesh({"all": world}).group("all")
        for mode, axes in layouts(world):
            check_esmfold(mode, axes, device=device, dropout=0.2)
            check_esmfold(mode, axes, device=device, recycles=0)
            if process.rank == 0:
                print(f"right  {mode:<5} {axes}", flush=True)
        sizes = [768, 1536, 4096] if device.type == "cuda" else [12]
        split = [(mode, Mesh(axes)) for mode, axes in layouts(world)] if world > 1 else []
        for residues in sizes if "--time" in sys.argv else ():
            for mode, mesh in (("dap", Mesh({"axial": 1}, rank=0)), *split):
                dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
                lines = compare(mesh, mode, residues, device, dtype)
                barrier(everyone, device)
                if process.rank == 0:
                    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
