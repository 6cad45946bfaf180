"""Runs with values on a few CPU ranks: the ring's output and gradients, and counts, beside one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.sequence_parallelism.bert import Shape, Stack
from experiments.sequence_parallelism.counting import RING, RING_SELF, TENSOR, count, mesh_of, split, watch
from meshfold.mesh.testing import run_on_ranks
from meshfold.sequence import attention, shard_sequence

SMALL = Shape(name="small", hidden=32, heads=4, layers=2)
BATCH, LENGTH = 2, 32


def everything(ranks: Sequence[int] = (2, 4)) -> list[dict[str, Any]]:
    """A row for each scheme and number of ranks; the worst of all ranks."""
    rows = []
    for n in ranks:
        for scheme in (TENSOR, RING_SELF, RING):
            found = run_on_ranks(n, on_rank, scheme, n)
            worst = {
                name: max((one[name] for one in found), key=lambda x: abs(x - 1) if "ratio" in name else x)
                for name in found[0]
            }
            planned = count(scheme, n, SMALL, BATCH, LENGTH, layers=SMALL.layers, dtype=torch.float32)
            rows.append(
                {
                    "scheme": scheme,
                    "N": n,
                    **worst,
                    "planned sent": planned.forward + planned.backward,
                    "planned kept": planned.kept,
                }
            )
    return rows


def on_rank(scheme: str, ranks: int) -> dict[str, float]:
    """One rank: errors are relative to the largest element of what one process computes, in float64."""
    mesh = mesh_of(scheme, ranks)
    torch.manual_seed(1)
    serial = Stack(SMALL.hidden, SMALL.heads, SMALL.layers).double().eval()
    x, dy = torch.randn(2, BATCH, LENGTH, SMALL.hidden, dtype=torch.float64)
    y, dx = _run(serial, x, dy)
    model = copy.deepcopy(serial)
    pieces = split(model, mesh, scheme)

    def mine(whole: Tensor) -> Tensor:
        return whole if pieces == 1 else shard_sequence(whole, mesh, scheme)

    y_n, dx_n = _run(model, mine(x), mine(dy))
    found = {"output error": _error(y_n, mine(y), y), "gradient error": _error(dx_n, mine(dx), dx)}
    if scheme != TENSOR:
        found |= _gradients(scheme, mesh)
    model = Stack(SMALL.hidden, SMALL.heads, SMALL.layers)
    counted = watch(
        model, BATCH, LENGTH // split(model, mesh, scheme), SMALL.hidden, torch.device("cpu"), torch.float32
    )
    return found | {"sent": counted.forward + counted.backward, "kept": counted.kept}


def _run(model: Stack, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = model(x.flatten(0, 1), x.shape[1]).view_as(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


def _gradients(scheme: str, mesh: Any) -> dict[str, float]:
    """The attention alone: by how much this rank's dQ, dK and dV are those of one process."""
    shape = (BATCH, LENGTH, SMALL.heads, SMALL.hidden // SMALL.heads)
    whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    dy = torch.randn(shape, dtype=torch.float64)
    q, k, v = (one.transpose(1, 2) for one in whole)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    wanted = torch.autograd.grad(y, whole, dy)
    mine = [shard_sequence(one.detach(), mesh, scheme).requires_grad_() for one in whole]
    out = attention(*mine, mesh=mesh, mode=scheme, causal=False)
    seen = torch.autograd.grad(out, mine, shard_sequence(dy, mesh, scheme))
    found = {}
    for name, gradient, full in zip(("dQ", "dK", "dV"), seen, wanted, strict=True):
        part = shard_sequence(full, mesh, scheme)
        found[f"{name} ratio"] = float((gradient * part).sum() / (part * part).sum())
    return found


def _error(ours: Tensor, theirs: Tensor, scale: Tensor) -> float:
    return float((ours - theirs).abs().max() / scale.abs().max())
