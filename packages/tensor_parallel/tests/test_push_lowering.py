"""The push lowering on CPU ranks: compiled, with gradients left out, where ranks cannot push, and exactly summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_parallel_models import VOCAB, Flat
from torch import Tensor

from meshfold.mesh import Mesh, record
from meshfold.mesh.collectives.push import channels
from meshfold.mesh.testing import ranks
from meshfold.tensor_parallel import parallelize, plan
from meshfold.tensor_parallel.layers import Linear
from meshfold.tensor_parallel.lowerings import LOWERINGS
from meshfold.tensor_parallel.matmul import bind_matmul, matmul

COLUMN = plan("m:t k", "k n:t", "m n:t")
ROW = plan("m k:t", "k:t n", "m:t n")
M, K, N = 8, 12, 20


def serial(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in ((M, K), (N, K), (M, N)))  # type: ignore[return-value]


def blocks(p: Any, mesh: Mesh, tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's x, w and dy."""
    x, w, dy = tensors
    i, g = mesh.index("t"), mesh.size("t")
    if p is COLUMN:
        return x.chunk(g, 0)[i].contiguous(), w.chunk(g, 0)[i].contiguous(), dy.chunk(g, 1)[i].contiguous()
    return x.chunk(g, 1)[i].contiguous(), w.chunk(g, 1)[i].contiguous(), dy.chunk(g, 0)[i].contiguous()


def results(p: Any, mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's y, dx and dw of the serial matmul in float64."""
    x, w, dy = serial()
    y, dx, dw = x @ w.t(), dy @ w, dy.t() @ x
    i, g = mesh.index("t"), mesh.size("t")
    if p is COLUMN:
        return y.chunk(g, 1)[i], dx.chunk(g, 0)[i], dw.chunk(g, 0)[i]
    return y.chunk(g, 0)[i], dx.chunk(g, 1)[i], dw.chunk(g, 1)[i]


def run(p: Any, mesh: Mesh, product: Any, wants: tuple[bool, bool] = (True, True)) -> tuple[Tensor, ...]:
    x, w, dy = blocks(p, mesh, serial())
    x.requires_grad_(wants[0]), w.requires_grad_(wants[1])
    y = product(x, w)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def check(p: Any, mesh: Mesh, product: Any, wants: tuple[bool, bool] = (True, True)) -> None:
    for found, wanted, asked in zip(run(p, mesh, product, wants), results(p, mesh), (True, *wants), strict=True):
        if asked:
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        else:
            assert found is None


@ranks(2)
def test_each_gradient_alone_and_both() -> None:
    mesh = Mesh(dict(t=2))
    for p in (COLUMN, ROW):
        product = bind_matmul(p, mesh, lowering="push")
        for wants in ((True, True), (True, False), (False, True)):
            check(p, mesh, product, wants)


@ranks(2)
def test_one_graph_with_the_same_numbers() -> None:
    mesh = Mesh(dict(t=2))
    for p in (COLUMN, ROW):
        torch.compiler.reset()
        check(p, mesh, torch.compile(bind_matmul(p, mesh, lowering="push"), fullgraph=True, backend="aot_eager"))


@ranks(2)
def test_the_records_are_those_of_the_gather_lowering() -> None:
    mesh = Mesh(dict(t=2))
    for p in (COLUMN, ROW):
        logs = []
        for lowering in ("gather", "push"):
            with record() as log:
                check(p, mesh, bind_matmul(p, mesh, lowering=lowering))
            logs.append(log.count())
        assert logs[0] == logs[1]


def pushes(mode: str) -> None:
    """Train a Llama of two blocks: loss, gradients and records are those of the gather lowering."""
    mesh = Mesh(dict(tensor=2))
    ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    found = []
    for lowering in ("gather", "push"):
        torch.manual_seed(5)
        model = Flat(gated=True).double()
        parallelize(model, mesh, mode, lowering=lowering)
        with record() as log:
            loss = model(ids, labels=ids).loss
            assert loss is not None
            loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), gradients, log.count()))
        used = {module.lowering for module in model.modules() if isinstance(module, Linear)}
        assert ("push" in used) == (lowering == "push"), used
    (gathered, wanted, ordinary), (pushed, gradients, records) = found
    assert ordinary == records and gradients.keys() == wanted.keys()
    torch.testing.assert_close(pushed, gathered, rtol=1e-12, atol=1e-12)
    for name, grad in wanted.items():
        torch.testing.assert_close(gradients[name], grad, rtol=1e-9, atol=1e-9)


@ranks(2)
def test_a_model_pushes_in_the_layers_that_can() -> None:
    for mode in ("1d+sequence", "1d+tokens"):
        pushes(mode)


def nowhere(group: Any, device: torch.device) -> str:
    return "GPU 0 does not reach the memory of GPU 1"


@ranks(2)
def test_ranks_that_cannot_push_gather_as_ever() -> None:
    mesh, found = Mesh(dict(t=2)), channels._reason
    kept, channels._reason = dict(channels._channels), nowhere
    channels._channels.clear()
    try:
        for p in (COLUMN, ROW):
            check(p, mesh, bind_matmul(p, mesh, lowering="push"))
            torch.compiler.reset()
            product = torch.compile(bind_matmul(p, mesh, lowering="push"), fullgraph=True, backend="aot_eager")
            check(p, mesh, product)
        assert set(channels._channels.values()) == {"GPU 0 does not reach the memory of GPU 1"}
    finally:
        channels._reason = found
        channels._channels.clear()
        channels._channels.update(kept)


@ranks(3)
def test_half_precision_parts_are_summed_in_float32_and_rounded_once() -> None:
    mesh = Mesh(dict(t=3))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 12, generator=generator).bfloat16()
    w = torch.randn(5, 12, generator=generator).bfloat16()
    parts = [a @ b.t() for a, b in zip(x.chunk(3, 1), w.chunk(3, 1), strict=True)]  # each rounded to bfloat16
    exact = (parts[0].float() + parts[1].float() + parts[2].float()).bfloat16()
    i = mesh.index("t")
    mine = x.chunk(3, 1)[i].contiguous(), w.chunk(3, 1)[i].contiguous()
    y = matmul(*mine, ROW, mesh, lowering="push")
    # The rows of one rank are a product of their own, which may round otherwise than as a part of the whole.
    rows = [(a.chunk(3, 0)[i] @ b.t()).float() for a, b in zip(x.chunk(3, 1), w.chunk(3, 1), strict=True)]
    assert torch.equal(y, (rows[0] + rows[1] + rows[2]).bfloat16())
    assert (y - exact.chunk(3, 0)[i]).abs().max() <= 0.0625


@ranks(2)
def test_between_two_ranks_the_own_product_adds_to_what_arrives_and_rounds_once() -> None:
    mesh = Mesh(dict(t=2))
    generator = torch.Generator().manual_seed(1)
    i = mesh.index("t")
    for rows in (6, 8):  # 3 and 4 of a rank: whole, and in halves
        x = torch.randn(rows, 12, generator=generator).bfloat16()
        w = torch.randn(5, 12, generator=generator).bfloat16()
        mine = x.chunk(2, 1)[i].contiguous(), w.chunk(2, 1)[i].contiguous()
        y = matmul(*mine, ROW, mesh, lowering="push")
        own, other = ((x.chunk(2, 1)[j].chunk(2, 0)[i].double() @ w.chunk(2, 1)[j].double().t()) for j in (i, 1 - i))
        exact = own + other.bfloat16().double()  # the other's part travels in bfloat16
        assert ((y.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize(
    "layouts",
    [("m k:t", "k:t n", "m n"), ("m k:t", "k n:t", "m n:t"), ("m:a,b k", "k n:a,b", "m n:a,b")],
    ids=["nothing moves", "columns", "two axes"],
)
def test_other_plans_are_refused(layouts: tuple[str, str, str]) -> None:
    assert "only the rows of x or of y" in LOWERINGS["push"].refuses(plan(*layouts))
