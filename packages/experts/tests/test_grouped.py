"""Grouped matmul and the layer on one process, against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_models import EXPERTS, FFN, HIDDEN, TOP_K, plain_mixture
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from meshfold.experts import MixtureOfExperts, grouped_matmul
from meshfold.experts.router_logits import router_logits
from meshfold.kernels import routing_totals, softmax_choice


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sizes", [(16, 24), (7, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_grouped_matmul_is_a_loop(dtype: torch.dtype, sizes: tuple[int, int], turned: bool) -> None:
    a, b = sizes
    for counts in ([3, 0, 6, 1], [0, 0, 0, 0], [0, 9, 0, 0]):
        torch.manual_seed(0)
        x = torch.randn(sum(counts), a, dtype=torch.float64).to(dtype)
        weight = torch.randn(4, *((b, a) if turned else (a, b)), dtype=torch.float64).to(dtype)
        towards = torch.randn(sum(counts), b, dtype=torch.float64).to(dtype)
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        y = grouped_matmul(
            leaves[0], leaves[1].transpose(1, 2) if turned else leaves[1], ends, counts if turned else None
        )
        matrix = exact[1].transpose(1, 2) if turned else exact[1]
        expected = torch.cat([rows @ m for rows, m in zip(exact[0].split(counts), matrix, strict=True)])
        y.backward(towards)
        expected.backward(towards.double())
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
        for found, wanted in ((y, expected), *((p.grad, q.grad) for p, q in zip(leaves, exact, strict=True))):
            assert found.dtype is dtype
            torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_the_layer_is_the_sum_of_its_experts() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(HIDDEN, FFN, EXPERTS, TOP_K, shared=12).double()
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    rows = x.view(-1, HIDDEN)
    weights, index = (rows @ layer.router.weight.t()).softmax(1).topk(TOP_K)
    routed = plain_mixture(
        rows, index, weights / weights.sum(1, keepdim=True), layer.experts.gate_up, layer.experts.down
    )
    assert layer.shared is not None
    gate, up = rows @ layer.shared.gate.weight.t(), rows @ layer.shared.up.weight.t()
    expected = (routed + (torch.nn.functional.silu(gate) * up) @ layer.shared.down.weight.t()).view(x.shape)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(gradients, wanted, rtol=1e-12, atol=1e-12)
    half = layer.bfloat16()(x.bfloat16())
    torch.testing.assert_close(half.double(), expected, rtol=0.05, atol=0.05)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \[4, 3\], \[2, 5, 6\] and \[2\]"):
        grouped_matmul(torch.zeros(4, 3), torch.zeros(2, 5, 6), torch.zeros(2, dtype=torch.int32))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_compiled_code_launches_the_same_product(dtype: torch.dtype) -> None:
    """One graph with three products in it, not a loop over experts; gradients to the bit. One expert has no rows."""
    torch.manual_seed(0)
    x = torch.randn(24, 32, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 16, 32, dtype=dtype, requires_grad=True)
    ends = torch.tensor([8, 8, 17, 24], dtype=torch.int32)
    nodes: list[str] = []

    def seen(graph: Any, inputs: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return grouped_matmul(x, weight.transpose(1, 2), ends)

    def backend(graph: Any, inputs: Any) -> Any:
        return aot_autograd(fw_compiler=seen, bw_compiler=seen)(graph, inputs)

    wanted = torch.autograd.grad(product(x, weight).square().sum(), (x, weight))
    run = torch.compile(product, backend=backend, fullgraph=True)
    found = torch.autograd.grad(run(x, weight).square().sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert nodes.count("meshfold.grouped_product.default") == 3, nodes


def test_a_second_derivative_is_refused_behind_a_constant_gradient_too() -> None:
    """That of ``y.sum()`` is constant: torch's decorator lets it pass, and a second derivative was silently without a part."""
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(2, 4, 3, requires_grad=True)
    logits = torch.randn(5, 4, requires_grad=True)
    low, router = (torch.randn(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((5, 8), (4, 8)))
    shares, index = logits.detach().softmax(1).requires_grad_(), logits.detach().topk(2).indices
    for made, leaves in (
        (grouped_matmul(x, weight, torch.tensor([4, 6], dtype=torch.int32)), (x, weight)),
        (router_logits(low, router)[1], (low, router)),
        (softmax_choice(logits, 2, True)[1], (logits,)),
        (routing_totals(logits, shares, index)[2], (logits,)),
    ):
        gradients = torch.autograd.grad(made.sum(), leaves, create_graph=True)
        assert all(gradient.requires_grad for gradient in gradients)
        for gradient in gradients:
            with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with @once_diff"):
                gradient.float().square().sum().backward(retain_graph=True)
