"""Every public function inside torch.compile: one graph, same numbers, forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from meshfold import kernels as K


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


X, R, W, B = seeded(6, 16), seeded(6, 16, seed=1), seeded(16, seed=2), seeded(16, seed=3)
LABELS = torch.tensor([0, 3, -100, 15, 7, 7])
Q, KEY = seeded(2, 3, 4, 8, seed=4), seeded(2, 3, 2, 8, seed=5)
EDGES, NODES, PAIR_BIAS = seeded(1, 2, 3, 2, 4, seed=6), seeded(1, 2, 5, 2, 4, seed=7), seeded(1, 2, 3, 5, seed=8)
COS, SIN = torch.randn(3, 8), torch.randn(3, 8)

WHOLE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rms_norm": (lambda x, w: K.rms_norm(x, w), (X, W)),
    "layer_norm": (lambda x, w, b: K.layer_norm(x, w, b), (X, W, B)),
    "add_rms_norm": (lambda x, r, w: K.add_rms_norm(x, r, w), (X, R, W)),
    "add_layer_norm": (lambda x, r, w, b: K.add_layer_norm(x, r, w, b), (X, R, W, B)),
    "swiglu": (lambda x: K.swiglu(x), (X,)),
    "geglu2": (lambda x, r: K.geglu2(x, r, "tanh"), (X, R)),
    "swiglu2": (lambda x, r: K.swiglu2(x, r), (X, R)),
    "apply_rotary": (lambda q, k: K.apply_rotary(q, k, COS, SIN), (Q, KEY)),
    "pair_attention": (lambda q, k, b: K.pair_attention(q, k, k.exp(), b), (EDGES, NODES, PAIR_BIAS)),
    "cross_entropy": (lambda x: K.cross_entropy(x, LABELS, -100, 0.1, 1e-2), (X,)),
    "dropout": (lambda x: K.dropout(x, 0.5, 3, 4, 2, 1, 20), (X,)),
}


class SplitRMSNorm(torch.autograd.Function):
    """The pieces as a layer uses them: in a Function of its own, with a sum where ranks would all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        rstd = torch.rsqrt(2 * K.rms_norm_stats(x) / 32 + 1e-6)
        ctx.save_for_backward(x, w, rstd)
        return K.rms_norm_apply(x, w, rstd)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, rstd = ctx.saved_tensors
        sums = 2 * K.rms_norm_backward_stats(dy, x, w, rstd)
        return K.rms_norm_backward_apply(dy, x, w, rstd, sums, 32)


class SplitLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        mean, rstd = K.layer_norm_joined(K.layer_norm_stats(x).expand(2, 2, *x.shape[:-1]), 1e-6)
        ctx.save_for_backward(x, w, mean, rstd)
        return K.layer_norm_apply(x, w, b, mean, rstd)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, mean, rstd = ctx.saved_tensors
        sums = 2 * K.layer_norm_backward_stats(dy, x, w, mean, rstd)
        return K.layer_norm_backward_apply(dy, x, w, mean, rstd, sums, 32)


class SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        row_max = K.local_max(x, 15) + 1
        sums = K.sum_exp_and_target(x, row_max, LABELS, 0, 15)
        ctx.save_for_backward(x, row_max, sums)
        return K.loss_per_row(row_max, sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, row_max, sums = ctx.saved_tensors
        return K.cross_entropy_backward(x, row_max, sums[0], LABELS, 0, grad, 0.0, 0.0, 15, 15, True)


PIECES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rms_norm pieces": (lambda x, w: SplitRMSNorm.apply(x, w), (X, W)),
    "layer_norm pieces": (lambda x, w, b: SplitLayerNorm.apply(x, w, b), (X, W, B)),
    "cross_entropy pieces": (lambda x: SplitCrossEntropy.apply(x * 1), (X,)),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def results(op: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    out = op(*inputs)
    out = (out,) if isinstance(out, Tensor) else out
    towards = [torch.cos(torch.arange(y.numel()).float()).view(y.shape) for y in out]
    return [*out, *torch.autograd.grad(out, inputs, towards)]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*WHOLE, *PIECES])
def test_traces_into_one_graph(name: str) -> None:
    """fullgraph=True refuses any break; aot_eager traces the backward as well."""
    op, inputs = (WHOLE | PIECES)[name]
    wanted = results(op, inputs)
    got = results(torch.compile(op, fullgraph=True, backend="aot_eager"), inputs)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


SYMBOLS: list[tuple[Any, int]] = [(1, 2), (-3, 1 << 62), (99, 5)]
IN_A_TENSOR: list[tuple[Any, int]] = [(torch.tensor(-8), 5), (torch.tensor(3), 5)]


@pytest.mark.parametrize(
    ("backend", "seeds"),
    [
        ("aot_eager", [*SYMBOLS, *IN_A_TENSOR]),
        # As layers give it; ten seconds of Inductor.
        pytest.param("inductor", IN_A_TENSOR, marks=pytest.mark.slow),
        # Half a minute: Inductor writes a number that is used twice down twice, in each of its rounds.
        pytest.param("inductor", SYMBOLS, marks=pytest.mark.slow),
    ],
    ids=["traced", "inductor, in a tensor", "inductor, symbols"],
)
def test_dropout_drops_the_same_elements_when_the_seed_changes(backend: str, seeds: list[tuple[Any, int]]) -> None:
    """For seeds that become symbols, and for those in a tensor."""
    compiled = torch.compile(lambda x, seed, key: K.dropout(x, 0.5, seed, key), fullgraph=True, backend=backend)
    x = X.detach()
    for seed, key in seeds:
        assert torch.equal(compiled(x, seed, key), K.dropout(x, 0.5, seed, key))


@pytest.mark.slow  # compiles C++
def test_inductor_keeps_one_rounding() -> None:
    x, w = X.detach().bfloat16(), W.detach().bfloat16()
    compiled = torch.compile(lambda x, w: K.swiglu(K.rms_norm(x, w)), fullgraph=True)
    torch.testing.assert_close(compiled(x, w), K.swiglu(K.rms_norm(x, w)), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("biased", [True, False])
def test_pair_attention_as_operations(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's compiled code has attention with pair bias as two operations; the bias may need no gradient."""
    module = importlib.import_module("meshfold.kernels.pair_attention")
    monkeypatch.setattr(module, "_compiles_kernels", lambda q: True)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "pair_attention" in str(node.target))
        return make_boxed_func(graph.forward)

    leaves = (EDGES, NODES, *([PAIR_BIAS] if biased else []))

    def run(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
        return K.pair_attention(q, k, k.exp(), PAIR_BIAS.detach() if bias is None else bias)

    compiled = torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=backend, bw_compiler=backend))
    got, wanted = (f(*leaves) for f in (compiled, run))
    torch.testing.assert_close(got, wanted)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(9))
    for x, y in zip(*(torch.autograd.grad(y, leaves, weight) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(x, y)
    assert seen == ["meshfold.pair_attention.default", "meshfold.pair_attention_gradients.default"]
