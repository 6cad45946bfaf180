"""Attention with pair bias, in one piece and in parts, against autograd through plain softmax; what is refused."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import Tensor

from meshfold import kernels as K


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, key_bias: Tensor) -> Tensor:
    logits = torch.einsum("brqhd,brkhd->brhqk", q, k) / math.sqrt(q.shape[-1])
    weights = (logits + bias.unsqueeze(1) + key_bias[:, :, None, None]).softmax(-1)
    return torch.einsum("brhqk,brkhd->brqhd", weights, v)


@pytest.mark.parametrize("most", [1 << 28, 40, 1])
def test_output_and_gradients_equal_autograd(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("meshfold.kernels.pair_attention"), "MOST_ELEMENTS", most)
    torch.manual_seed(0)
    q, k, v, bias = random(2, 3, 4, 2, 5), random(2, 3, 6, 2, 5), random(2, 3, 6, 2, 5), random(2, 2, 4, 6)
    key_bias = torch.zeros(2, 3, 6, dtype=torch.float64).masked_fill_(torch.rand(2, 3, 6) > 0.6, -math.inf)
    key_bias[..., 0] = 0.0
    weight = torch.randn(2, 3, 4, 2, 5, dtype=torch.float64)
    wanted, got = plain(q, k, v, bias, key_bias), K.pair_attention(q, k, v, bias, key_bias)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    inputs = (q, k, v, bias)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradients_equal_finite_differences() -> None:
    torch.manual_seed(1)
    bias = torch.randn(1, 3, 2, 2, dtype=torch.float64, requires_grad=True)  # b k h q
    assert torch.autograd.gradcheck(
        lambda q, k, v, bias: K.pair_attention(q, k, v, bias.permute(0, 2, 3, 1)),
        (random(1, 2, 2, 2, 3), random(1, 2, 3, 2, 3), random(1, 2, 3, 2, 3), bias),
    )


def test_a_row_without_a_key_is_zero_and_has_no_gradient() -> None:
    q, k = random(1, 2, 2, 1, 4), random(1, 2, 3, 1, 4)
    key_bias = torch.zeros(1, 2, 3, dtype=torch.float64)
    key_bias[0, 1] = -math.inf
    out = K.pair_attention(q, k, k, None, key_bias)
    with torch.no_grad():
        _, lse = K.pair_attention_forward(q, k, k, None, key_bias)
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert not out[0, 1].any() and torch.isneginf(lse[0, 1]).all()
    assert not dq[0, 1].any() and not dk[0, 1].any() and dk[0, 0].any()


def test_keys_in_two_parts_give_the_gradients_of_all_keys() -> None:
    """As ranks do that pass keys around: each part is given the output and log-sum-exp of all keys."""
    torch.manual_seed(2)
    q, k, v, bias = random(1, 2, 4, 2, 5), random(1, 2, 6, 2, 5), random(1, 2, 6, 2, 5), random(1, 2, 4, 6)
    out = K.pair_attention(q, k, v, bias)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (q, k, v, bias), dout)
    with torch.no_grad():
        found, lse = K.pair_attention_forward(q, k, v, bias, None)
        parts = [
            K.pair_attention_backward(dout, q, k[:, :, some], v[:, :, some], bias[..., some], None, found, lse)
            for some in (slice(0, 2), slice(2, 6))
        ]
    (dq, dk, dv, dbias), (dq2, dk2, dv2, dbias2) = parts
    assert dbias is not None and dbias2 is not None
    got = (dq + dq2, torch.cat((dk, dk2), 2), torch.cat((dv, dv2), 2), torch.cat((dbias, dbias2), -1))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_wrong_shapes_are_refused() -> None:
    q, k = torch.zeros(1, 2, 3, 4, 8), torch.zeros(1, 2, 5, 4, 8)
    with pytest.raises(ValueError, match=r"must be \[b, h, q, k\] = \[1, 4, 3, 5\]"):
        K.pair_attention(q, k, k, torch.zeros(1, 4, 5, 3))
    with pytest.raises(ValueError, match=r"must be \[b, r, k\] = \[1, 2, 5\]"):
        K.pair_attention(q, k, k, None, torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="same batch, rows, heads"):
        K.pair_attention(q, k[:, :1], k[:, :1])
