"""Attention with pair bias, in one piece and in parts, against autograd; masks; outer products in parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meshfold.folding import attend, functions, key_bias_of


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, key_bias: Tensor) -> Tensor:
    logits = torch.einsum("brqhd,brkhd->brhqk", q, k) / math.sqrt(q.shape[-1])
    weights = (logits + bias.unsqueeze(1) + key_bias[:, :, None, None]).softmax(-1)
    return torch.einsum("brhqk,brkhd->brqhd", weights, v)


def test_a_row_with_every_key_masked_attends_to_all() -> None:
    torch.manual_seed(0)
    q, k, v, bias = random(2, 3, 4, 2, 5), random(2, 3, 6, 2, 5), random(2, 3, 6, 2, 5), random(2, 2, 4, 6)
    mask = torch.rand(2, 3, 6) > 0.4
    mask[0, 1] = False
    keys = key_bias_of(mask, torch.float64)
    weight = torch.randn(2, 3, 4, 2, 5, dtype=torch.float64)
    wanted, got = plain(q, k, v, bias, keys), attend(q, k, v, bias, keys)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    inputs = (q, k, v, bias)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_keys_that_are_padding_never_count() -> None:
    bias = key_bias_of(torch.tensor([[1, 0, 1], [0, 0, 0]]), torch.float32, padding=2)
    inf = math.inf
    assert bias.tolist() == [[0, -inf, 0, -inf, -inf], [0, 0, 0, -inf, -inf]]


def test_half_precision_sums_in_float32() -> None:
    torch.manual_seed(0)
    wide = [torch.randn(1, 2, 8, 2, 16) for _ in range(3)]
    half = [x.bfloat16().requires_grad_() for x in wide]
    bias = torch.randn(1, 2, 8, 8).bfloat16().requires_grad_()
    out = attend(*half, bias)
    out.sum().backward()
    wanted = attend(*(x.detach().float() for x in half), bias.detach().float())
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-2)
    assert out.dtype is torch.bfloat16 and bias.grad is not None and bias.grad.dtype is torch.bfloat16


def test_outer_products_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    a, b, weight, bias = random(2, 3, 5, 2), random(2, 3, 4, 3), random(7, 6), random(7)
    results = []
    for most in (1 << 28, 100):
        monkeypatch.setattr(functions, "MOST_ELEMENTS", most)
        y = functions.outer_products(a, b, weight, bias)
        results.append([y, *torch.autograd.grad(y.square().sum(), (a, b, weight, bias))])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-12, atol=1e-12)
