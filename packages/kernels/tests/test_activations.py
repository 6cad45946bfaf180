"""SwiGLU and bias + GELU against torch's own in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfold import kernels as K

Check = Callable[..., None]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def seeded(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def compare(op: Callable[..., Tensor], exact_op: Callable[..., Tensor], check: Check, *inputs: Tensor) -> None:
    leaves = tuple(t.requires_grad_() for t in inputs)
    exact_leaves = tuple(t.detach().double().requires_grad_() for t in inputs)
    y, exact = op(*leaves), exact_op(*exact_leaves)
    check(y, exact, "y")
    dy = seeded(*y.shape, dtype=y.dtype, seed=5)
    got, wanted = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(exact, exact_leaves, dy.double())
    for i, (g, e) in enumerate(zip(got, wanted, strict=True)):
        check(g, e, f"gradient {i}", slack=2)


def exact_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 10), (1, 2), (9, 34), (6,), (0, 4)], ids=str)
def test_swiglu(dtype: torch.dtype, shape: tuple[int, ...], rounded_once: Check) -> None:
    compare(K.swiglu, exact_swiglu, rounded_once, seeded(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_swiglu(dtype: torch.dtype, rounded_once: Check) -> None:
    for shape in ((9, 34), (1, 2), (0, 4)):
        inputs = seeded(*shape, dtype=dtype), seeded(shape[0], dtype=dtype, seed=1)
        compare(K.weighted_swiglu, lambda x, w: exact_swiglu(x) * w.unsqueeze(1), rounded_once, *inputs)
    with pytest.raises(ValueError, match=r"a weight for each row.* \[3, 4\] and \[2\]"):
        K.weighted_swiglu(torch.zeros(3, 4), torch.zeros(2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_of_two_tensors(dtype: torch.dtype, rounded_once: Check) -> None:
    gate, up = seeded(5, 7, dtype=dtype), seeded(5, 7, dtype=dtype, seed=1)
    compare(K.swiglu2, lambda a, b: F.silu(a) * b, rounded_once, gate, up)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_geglu_of_two_tensors(approximate: str, dtype: torch.dtype, rounded_once: Check) -> None:
    gate, up = seeded(5, 7, dtype=dtype), seeded(5, 7, dtype=dtype, seed=1)
    compare(
        lambda a, b: K.geglu2(a, b, approximate),
        lambda a, b: F.gelu(a, approximate=approximate) * b,
        rounded_once,
        gate,
        up,
    )


@pytest.mark.parametrize(
    "activation",
    [lambda x: K.swiglu(x), lambda x: K.swiglu2(x, x), lambda x: K.dropout(x, 0.5, 1, 2)],
)
def test_results_may_be_changed_in_place(activation: Callable[[Tensor], Tensor]) -> None:
    """As behind torch's own: ``y = act(x); y *= 2``."""
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    y = activation(x)
    y *= 2
    (got,), (wanted,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(2 * activation(x).sum(), x)
    torch.testing.assert_close(got, wanted)


def test_gradcheck() -> None:
    x, u = (seeded(3, 4, seed=i).requires_grad_() for i in range(2))
    assert torch.autograd.gradcheck(K.swiglu, (x,))
    assert torch.autograd.gradcheck(K.swiglu2, (x, u))
    assert torch.autograd.gradcheck(K.weighted_swiglu, (x, seeded(3, seed=4).requires_grad_()))
    for approximate in ("none", "tanh"):
        assert torch.autograd.gradcheck(lambda a, c, how=approximate: K.geglu2(a, c, how), (x, u))


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 7), half=st.integers(1, 9), step=st.integers(1, 3))
def test_strided_halves(rows: int, half: int, step: int) -> None:
    """Gate and up may be slices of something wider, with rows apart."""
    wide = seeded(rows * step, 3 * half)
    gate, up = wide[::step, :half].requires_grad_(), wide[::step, 2 * half :].requires_grad_()
    y = K.swiglu2(gate, up)
    torch.testing.assert_close(y, F.silu(gate) * up)
    fused = torch.cat((gate, up), -1).detach().requires_grad_()
    torch.testing.assert_close(K.swiglu(fused), y)
    separate = torch.cat(torch.autograd.grad(y.square().sum(), (gate, up)), -1)
    torch.testing.assert_close(torch.autograd.grad(K.swiglu(fused).square().sum(), fused)[0], separate)


def test_large_inputs_stay_finite() -> None:
    x = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]], requires_grad=True)
    y = K.swiglu(x)
    assert torch.equal(y[0, 2:], torch.tensor([100.0, 1e4])) and (y[0, :2].abs() < 1e-30).all()
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.isfinite().all()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="even last dim"):
        K.swiglu(seeded(2, 5))
    with pytest.raises(ValueError, match="gate and up must have equal shapes"):
        K.swiglu2(seeded(2, 5), seeded(2, 4))
    with pytest.raises(ValueError, match="approximate is 'erf'"):
        K.geglu2(seeded(2, 5), seeded(2, 5), "erf")
