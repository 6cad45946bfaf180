"""Every block under every layout equals one process in float64: outputs and every gradient, on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from folding_models import MODELS, check_equal
from torch import Tensor

from meshfold.folding import Axes, AxialMode, find_axial_mode
from meshfold.folding.axial.product import edge_product
from meshfold.folding.axial.redistribute import Redistribution
from meshfold.folding.axial.ring import ring_attend
from meshfold.mesh import Mesh, Pending, collectives
from meshfold.mesh.testing import ranks

ATTENTION = ("exchange", "gather", "ring")


@pytest.mark.parametrize("kind", MODELS)
@ranks(2)
def test_dap_2(kind: str) -> None:
    check_equal(kind, "dap", {"axial": 2})


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", MODELS)
@ranks(3)
def test_dap_3_with_sizes_that_do_not_divide(kind: str) -> None:
    check_equal(kind, "dap", {"axial": 3})


@pytest.mark.parametrize("kind", MODELS)
@ranks(4)
def test_grid_2x2(kind: str) -> None:
    check_equal(kind, "grid", {"row": 2, "col": 2})


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("mode", "attention", "kind", "steps"),
    [("dap", "gather", "evoformer", 3), ("dap", "ring", "multimer", 2), ("grid", "exchange", "extra", 2)],
)
@ranks(2)
def test_other_ways_over_2_ranks(mode: str, attention: str, kind: str, steps: int) -> None:
    axes = {"axial": 2} if mode == "dap" else {"row": 2, "col": 1}
    check_equal(kind, mode, axes, attention=attention, product_steps=steps)


@pytest.mark.few(1)
@pytest.mark.parametrize("residues", [8, 5])
@ranks(2)
def test_without_masks(residues: int) -> None:
    check_equal("evoformer", "grid", {"row": 1, "col": 2}, sequences=3, residues=residues, masked=False)


@ranks(4)
def test_fewer_residues_than_ranks_and_a_stack() -> None:
    check_equal("evoformer", "dap", {"axial": 4}, sequences=5, residues=3, blocks=2)


@ranks(4)
def test_depth_and_a_mode_of_ones_own() -> None:
    check_equal("pairformer", "grid+depth", {"depth": 2, "row": 2, "col": 1})
    mine = AxialMode(name="mine", axes=("a", "b"), pair="i:b,a j", attention="gather")
    check_equal("evoformer", mine, {"a": 2, "b": 2})


@ranks(6)
def test_grid_2x3() -> None:
    check_equal("evoformer", "grid", {"row": 2, "col": 3}, product_steps=2)


def _own_slice(move: Redistribution, grad: Tensor) -> Pending:
    """Undo a gather by keeping this rank's slice of its own gradient, as FastFold's ``GatherAsync.backward`` does."""
    for step in reversed(move.steps):
        dim, group = move.dims[step.dim], move.mesh.group(*step.axes)
        if step.kind == "all_gather":
            grad = grad.chunk(group.size, dim)[group.index].contiguous()
        else:
            grad = collectives.all_to_all(grad, group, dim, move.dims[step.to])
    return Pending(grad, None)


def _other_memory(move: Redistribution, grad: Tensor) -> Pending:
    """Undo a gather without its permutation, as FastFold's ``GatherAsyncOpp.backward`` does: memory is read in another order."""
    for step in reversed(move.steps):
        dim, group = move.dims[step.dim], move.mesh.group(*step.axes)
        shape = list(grad.shape)
        if step.kind == "all_gather":
            shape[dim] //= group.size
            grad = collectives.reduce_scatter(grad.reshape(group.size, -1), group, 0).view(shape)
        else:
            grad = collectives.all_to_all(grad, group, dim, move.dims[step.to])
    return Pending(grad, None)


@pytest.mark.parametrize(("fault", "fewest"), [(_own_slice, 40), (_other_memory, 20)])
@ranks(2)
def test_the_two_faults_of_fastfold_are_noticed(
    fault: Callable[[Redistribution, Tensor], Pending], fewest: int
) -> None:
    right = Redistribution.start_adjoint
    Redistribution.start_adjoint = fault  # type: ignore[method-assign]
    try:
        with pytest.raises(AssertionError, match="differ") as error:
            check_equal("evoformer", "dap", {"axial": 2}, residues=8, blocks=2)
    finally:
        Redistribution.start_adjoint = right  # type: ignore[method-assign]
    wrong = str(error.value).splitlines()
    assert len(wrong) > fewest
    assert not any(line.startswith("output or input gradient 0:") for line in wrong)  # outputs are right all the same


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", MODELS)
@ranks(6)
def test_grid_2x3_every_way(kind: str, attention: str) -> None:
    check_equal(kind, "grid", {"row": 2, "col": 3}, attention=attention, blocks=2)
    check_equal(kind, "grid+depth", {"depth": 3, "row": 1, "col": 2}, attention=attention, product_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", MODELS)
@ranks(4)
def test_4_ranks_every_way(kind: str, attention: str) -> None:
    for mode, axes in (
        ("dap", {"axial": 4}),
        ("grid", {"row": 2, "col": 2}),
        ("grid", {"row": 1, "col": 4}),
        ("grid+depth", {"depth": 2, "row": 1, "col": 2}),
    ):
        check_equal(kind, mode, axes, attention=attention, blocks=2, product_steps=2, sequences=5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@ranks(2)
def test_2_ranks_every_layout(kind: str) -> None:
    for mode, axes in (("grid", {"row": 2, "col": 1}), ("grid", {"row": 1, "col": 2}), ("dap", {"axial": 2})):
        for masked in (True, False):
            check_equal(kind, mode, axes, masked=masked, blocks=2)


@ranks(2)
def test_a_second_derivative_is_refused() -> None:
    """Second derivatives of the triangle product and of attention over a ring, behind a constant gradient too."""
    mesh = Mesh({"axial": 2})
    x, w = (torch.randn(1, 4, 8, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    q, k, v = (torch.randn(1, 2, 4, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for y, leaves in (
        (edge_product(Axes.of(mesh, find_axial_mode("dap")), x, w), (x, w)),
        (ring_attend(q, k, v, None, None, mesh, ("axial",)), (q, k, v)),
    ):
        for gradient in torch.autograd.grad(y.sum(), leaves, create_graph=True):
            with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with"):
                gradient.square().sum().backward(retain_graph=True)
