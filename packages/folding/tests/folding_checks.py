"""Checks of split folding blocks on whatever device the ranks have, and their time and memory beside one rank's.

Run as a program on ranks: ``meshfold run --ranks 2 packages/folding/tests/folding_checks.py``. With ``--time``, it also measures
forward and backward of Evoformer blocks of AlphaFold's sizes in bfloat16.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))
from folding_models import MODELS, check_equal

from meshfold.folding import EvoformerBlock, parallelize_folding, sum_gradients
from meshfold.mesh import Mesh, barrier, start

SIZES = dict(
    c_m=256,
    c_z=128,
    c_hidden_msa_att=32,
    c_hidden_opm=32,
    c_hidden_mul=128,
    c_hidden_pair_att=32,
    no_heads_msa=8,
    no_heads_pair=4,
    transition_n=4,
    msa_dropout=0.0,
    pair_dropout=0.0,
)


def layouts(world: int) -> list[tuple[str, dict[str, int]]]:
    """Return every mode on so many ranks."""
    found: list[tuple[str, dict[str, int]]] = [("dap", {"axial": world})]
    found += [("grid", {"row": row, "col": world // row}) for row in range(1, world + 1) if world % row == 0]
    return found


def check(device: torch.device, world: int) -> None:
    """Compare every model under every layout with one rank, in float64."""
    for mode, axes in layouts(world):
        for kind in MODELS:
            for attention in ("exchange", "gather", "ring"):
                check_equal(kind, mode, axes, attention=attention, device=device, product_steps=2)
        if torch.distributed.get_rank() == 0:
            print(f"right  {mode:<5} {axes}", flush=True)


def measure(mesh: Mesh, mode: str, sequences: int, residues: int, device: torch.device, blocks: int = 2) -> str:
    """Return milliseconds a block, forward and backward, and the peak of memory."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(EvoformerBlock(**SIZES) for _ in range(blocks)).to(device, torch.bfloat16)
    parallelize_folding(model, mesh, mode)
    axes = model[0].axes
    dims = ((-3, axes.rows), (-2, axes.columns))
    shapes = ((1, sequences, residues, 256), (1, residues, residues, 128))
    whole = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    m, z = (axes.split(x, *dims).detach().requires_grad_() for x in whole)
    del whole
    masks = [torch.ones(shape[:-1], device=device, dtype=torch.bfloat16) for shape in shapes]
    gpu = device.type == "cuda"

    def run() -> Tensor:
        one, two = m, z
        for block in model:
            one, two = block(one, two, *masks)
        loss = one.float().square().mean() + two.float().square().mean()
        loss.backward()
        sum_gradients(model)
        return loss

    run()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin, rounds = time.perf_counter(), 5 if gpu else 1
    for _ in range(rounds):
        run()
    if gpu:
        torch.cuda.synchronize()
    ms = (time.perf_counter() - begin) / rounds / blocks * 1e3
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    return f"{ms:8.1f} ms a block   peak {peak:6.2f} GiB"


def main() -> None:
    """Check, and measure if asked to."""
    with start() as process:
        device, world = process.device, process.world_size
        everyone = Mesh({"all": world}).group("all")
        check(device, world)
        sizes = [(128, 256), (512, 384), (128, 768)] if device.type == "cuda" else [(4, 8)]
        for sequences, residues in sizes if "--time" in sys.argv else ():
            for name, mode, mesh in (
                ("one", "dap", Mesh({"axial": 1}, rank=0)),
                *((f"{mode} {axes}", mode, Mesh(axes)) for mode, axes in layouts(world)),
            ):
                line = measure(mesh, mode, sequences, residues, device)
                barrier(everyone, device)
                if process.rank == 0:
                    print(f"{sequences:>4} x {residues:<4} {name:<26} {line}", flush=True)


if __name__ == "__main__":
    main()
