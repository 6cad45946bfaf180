"""Bytes that a rank sends for a block: axial parallelism, counted and planned, tensor parallelism, FastFold's collectives.

FastFold's tensor parallelism is Megatron's, in attention and transitions: heads and hidden channels over ranks, an all-reduce of
the output forward and of the input's gradient backward. The outer product and triangle multiplications are not split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from experiments.fastfold.settings import C_M, C_Z, HEAD, HEADS_MSA, HEADS_PAIR, Phase, inputs, rank_of
from meshfold.folding import folding_cost, sum_gradients
from meshfold.mesh import Mesh, record
from meshfold.mesh.testing import fake_world
from meshfold.tensor_parallel import MODES, matmul, matmul_cost

PARTS = ("forward", "backward", "gradients")


def everything(phases: Sequence[Phase], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each phase and number of ranks, in elements of two bytes."""
    rows = []
    for phase in phases:
        for n in ranks:
            counted, planned = axial(n, phase.sequences, phase.residues)
            rows.append(
                {
                    "phase": phase.name,
                    "N": n,
                    "dap": counted,
                    "dap planned": planned,
                    "fastfold forward": fastfold_forward(n, phase.sequences, phase.residues),
                    "tensor": tensor(n, phase.sequences, phase.residues),
                }
            )
    return rows


def axial(ranks: int, sequences: int, residues: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return what a rank sends under ``dap`` by part of a step: recorded in a run, and planned."""
    with rank_of(ranks) as (block, _):
        m, z = inputs(ranks, sequences, residues)
        with record() as log:
            out = block(m, z)
            log.phase = "backward"
            torch.autograd.backward(out, [torch.empty_like(y) for y in out])
            log.phase = "gradients"
            sum_gradients(block)
        cost = folding_cost(block, residues=residues, sequences=sequences, itemsize=m.element_size())
    recorded = log.bytes_by("phase")
    counted = {part: float(recorded.get((part,), 0)) / m.element_size() for part in PARTS}
    planned = {
        part: float(sum(entry.bytes for entry in cost.entries if entry.phase == part)) / m.element_size()
        for part in PARTS
    }
    return counted, planned


def fastfold_forward(ranks: int, sequences: int, residues: int) -> float:
    """Return what FastFold's published code sends forward: six gathers and six all-to-alls.

    Gathered: the bias of row attention, one factor of the outer product, an operand of both triangle multiplications, two biases of
    triangle attention. Exchanged: the MSA twice, the pair tensor four times.
    """
    pairs, msa = residues**2, sequences * residues
    gathered = pairs * (HEADS_MSA + 2 * C_Z + 2 * HEADS_PAIR) + msa * 32
    exchanged = (2 * msa * C_M + 4 * pairs * C_Z) / ranks
    return (ranks - 1) / ranks * (gathered + exchanged)


def tensor(ranks: int, sequences: int, residues: int) -> dict[str, float]:
    """Return what a rank sends under tensor parallelism, recorded from products that run under the library's mode ``1d``.

    Raises:
        RuntimeError: if that is not what the products' plans say.
    """
    msa, pairs = sequences * residues, residues**2
    # tokens, channels, width of what the first product makes: queries, keys, values and gate; four times the channels
    wide_msa, wide_pair = 4 * HEADS_MSA * HEAD, 4 * HEADS_PAIR * HEAD
    halves = [
        (msa, C_M, wide_msa, HEADS_MSA * HEAD),
        (msa, C_M, wide_msa, HEADS_MSA * HEAD),
        (msa, C_M, 4 * C_M, 4 * C_M),
        (pairs, C_Z, wide_pair, HEADS_PAIR * HEAD),
        (pairs, C_Z, wide_pair, HEADS_PAIR * HEAD),
        (pairs, C_Z, 4 * C_Z, 4 * C_Z),
    ]
    found = dict.fromkeys(("forward", "backward"), 0.0)
    with fake_world(ranks):
        mesh = Mesh({"tensor": ranks})
        for tokens, channels, wide, inner in halves:
            for role, m, k, n in (("column", tokens, channels, wide), ("row", tokens, inner, channels)):
                for part, sent in _product(mesh, role, dict(m=m, k=k, n=n)).items():
                    found[part] += sent
        mesh.close()
    return found


def _product(mesh: Mesh, role: str, sizes: dict[str, int]) -> dict[str, float]:
    plan = MODES["1d"].plans[role]
    local_x, local_w = plan.local_sizes("x", sizes, mesh), plan.local_sizes("w", sizes, mesh)
    x = torch.empty(local_x["m"], local_x["k"], dtype=torch.bfloat16, device="meta", requires_grad=True)
    w = torch.empty(local_w["n"], local_w["k"], dtype=torch.bfloat16, device="meta", requires_grad=True)
    with record() as log:
        y = matmul(x, w, plan, mesh)
        log.phase = "backward"
        y.backward(torch.empty_like(y))
    cost = matmul_cost(plan, sizes, mesh, itemsize=2)
    if log.count("forward") != cost.count("forward") or log.count("backward") != cost.count("dx", "dw"):
        raise RuntimeError(f"a product of {sizes} on {mesh} sends\n{log}\nand its plan says\n{cost}")
    return {part: float(sent) / 2 for (part,), sent in log.bytes_by("phase").items() if isinstance(part, str)}
