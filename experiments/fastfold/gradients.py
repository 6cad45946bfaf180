"""Errors of gradients under two faulty backwards, and ours: blocks over two ranks beside one process, in float64.

The faults are those of FastFold's published code, written anew from their description, in place of the adjoint of our changes of
layout (:class:`meshfold.folding.axial.redistribute.Redistribution`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.folding import EvoformerStack, parallelize_folding, sum_gradients
from meshfold.folding.axial.redistribute import Redistribution
from meshfold.mesh import Mesh, Pending, collectives
from meshfold.mesh.testing import run_on_ranks

RANKS, BLOCKS, SEQUENCES, RESIDUES, CHANNELS = 2, 2, 8, 8, 8
SCALE = 0.4  # of random parameters
EXACT = 1e-9
SMALLEST = 1e-4  # of the largest of all: errors of what is below are relative to this; two are zero in exact arithmetic
Adjoint = Callable[[Redistribution, Tensor], Pending]


def own_slice(move: Redistribution, grad: Tensor) -> Pending:
    """Undo a gather by this rank's slice of its own gradient: what the other ranks made of the gathered tensor is lost."""
    for step in reversed(move.steps):
        dim, group = move.dims[step.dim], move.mesh.group(*step.axes)
        if step.kind == "all_gather":
            grad = grad.chunk(group.size, dim)[group.index].contiguous()
        else:
            grad = collectives.all_to_all(grad, group, dim, move.dims[step.to])
    return Pending(grad, None)


def other_order(move: Redistribution, grad: Tensor) -> Pending:
    """Undo a gather by reading memory in another shape, where dims should change places: sums are right, of wrong elements."""
    for step in reversed(move.steps):
        dim, group = move.dims[step.dim], move.mesh.group(*step.axes)
        shape = list(grad.shape)
        if step.kind == "all_gather":
            shape[dim] //= group.size
            grad = collectives.reduce_scatter(grad.reshape(group.size, -1), group, 0).view(shape)
        else:
            grad = collectives.all_to_all(grad, group, dim, move.dims[step.to])
    return Pending(grad, None)


FAULTS: dict[str, Adjoint | None] = {"ours": None, "own slice": own_slice, "other order": other_order}
"""Backwards of a gather by name; None: the right one."""


def everything() -> list[dict[str, Any]]:
    """A row for each backward: how far outputs are off, how many gradients of parameters are wrong, and how far."""
    first, *others = run_on_ranks(RANKS, on_rank)
    return [
        {
            "backward": name,
            "gradients": first[name]["gradients"],
            **{key: max(one[name][key] for one in (first, *others)) for key in ("outputs", "wrong", "worst")},
        }
        for name in FAULTS
    ]


def on_rank() -> dict[str, dict[str, float]]:
    """Compare this rank with one process."""
    names = [name for name, _ in _model().named_parameters()]
    whole = _run(_model(), Mesh({"axial": 1}, rank=0))
    found = {}
    for name, fault in FAULTS.items():
        with _adjoint(fault):
            split = _run(_model(), Mesh({"axial": RANKS}))
        count = len(whole) - len(names)
        outputs, gradients = _off(whole[:count], split[:count]), _off(whole[count:], split[count:])
        found[name] = {
            "gradients": len(names),
            "outputs": max(outputs),
            "wrong": sum(one > EXACT for one in gradients),
            "worst": max(gradients),
        }
    return found


@contextmanager
def _adjoint(fault: Adjoint | None) -> Iterator[None]:
    right = Redistribution.start_adjoint
    if fault is not None:
        Redistribution.start_adjoint = fault  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Redistribution.start_adjoint = right  # type: ignore[method-assign]


def _model() -> nn.Module:
    sizes = dict(c_hidden_msa_att=4, c_hidden_opm=3, c_hidden_mul=6, c_hidden_pair_att=4)
    heads = dict(no_heads_msa=2, no_heads_pair=2, transition_n=2)
    rates = dict(msa_dropout=0.0, pair_dropout=0.0)
    model = EvoformerStack(BLOCKS, CHANNELS, CHANNELS, CHANNELS, **sizes, **heads, **rates).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # AlphaFold's parameters begin at zero, which would hide what is wrong
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * SCALE)
    return model


def _run(model: nn.Module, mesh: Mesh) -> list[Tensor]:
    """Outputs, then every parameter's gradient."""
    parallelize_folding(model, mesh, "dap")
    generator = torch.Generator().manual_seed(3)
    m = torch.randn(1, SEQUENCES, RESIDUES, CHANNELS, generator=generator, dtype=torch.float64)
    z = torch.randn(1, RESIDUES, RESIDUES, CHANNELS, generator=generator, dtype=torch.float64)
    out = model(m, z)
    weights = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).sin() for y in out]
    torch.stack([(y * w).square().sum() for y, w in zip(out, weights, strict=True)]).sum().backward()
    sum_gradients(model)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [y.detach() for y in out] + gradients


def _off(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> list[float]:
    """Return the relative error of each tensor's largest difference."""
    largest = [float(one.abs().max()) for one in wanted]
    floor = SMALLEST * max(largest)
    return [float((a - b).abs().max()) / max(scale, floor) for a, b, scale in zip(wanted, got, largest, strict=True)]
