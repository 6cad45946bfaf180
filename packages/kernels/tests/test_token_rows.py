"""Tokens copied into rows and summed back, in plain torch, against loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshfold import kernels as K

TOKENS, EACH, ROWS, HIDDEN = 9, 3, 23, 12


def places_and_pairs(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Some pairs without a row, some rows without a pair (those have pair 0, which has a row of its own)."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(ROWS, generator=generator)[: ROWS - 3]
    slots = torch.randperm(TOKENS * EACH, generator=generator)[: len(rows)]
    slots[0] = 0 if not (slots == 0).any() else slots[0]
    places = torch.full((TOKENS * EACH,), -1).scatter(0, slots, rows)
    pairs = torch.zeros(ROWS, dtype=torch.int64).scatter(0, rows, slots)
    return places.view(TOKENS, EACH), pairs


def test_rows_are_copies_and_sums_are_weighted(rounded_once: Callable[..., None]) -> None:
    places, pairs = places_and_pairs()
    named = [int(row) for row in places.flatten() if row >= 0]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64).to(dtype).requires_grad_()
        rows = torch.randn(ROWS, HIDDEN, dtype=torch.float64).to(dtype)
        rows[[i for i in range(ROWS) if i not in named]] = torch.nan  # nobody reads them
        rows.requires_grad_()
        weights = torch.randn(TOKENS, EACH, dtype=torch.float64).to(dtype).requires_grad_()
        exact = [t.detach().double().requires_grad_() for t in (x, rows, weights)]
        y = K.take_rows(x, pairs, places)
        assert all(torch.equal(y[places[t, i]], x[t]) for t in range(TOKENS) for i in range(EACH) if places[t, i] >= 0)
        for given in (None, weights):
            z = K.sum_rows(rows, pairs, places, given)
            terms = [
                [
                    exact[1][places[t, i]] * (1 if given is None else exact[2][t, i])
                    for i in range(EACH)
                    if places[t, i] >= 0
                ]
                for t in range(TOKENS)
            ]
            wanted = torch.stack([sum(each, torch.zeros(HIDDEN, dtype=torch.float64)) for each in terms])
            rounded_once(z, wanted, "sum")
            changed = x.detach().clone()
            assert K.add_rows_(changed, rows, pairs, places, given) is changed
            rounded_once(changed, exact[0].detach() + wanted.detach(), "sum in place")
            without = (places < 0).all(1)
            assert torch.equal(changed[without], x[without])
            towards = torch.randn(TOKENS, HIDDEN).to(dtype)
            inputs, exact_inputs = ([rows], [exact[1]]) if given is None else ([rows, weights], [exact[1], exact[2]])
            found = torch.autograd.grad(z, inputs, towards)
            expected = torch.autograd.grad(wanted, exact_inputs, towards.double())
            for got, right in zip(found, expected, strict=True):
                keep = named if got.shape[0] == ROWS else slice(None)
                rounded_once(got[keep], right[keep], "gradient")
        towards = torch.randn(ROWS, HIDDEN).to(dtype)
        [dx] = torch.autograd.grad(y, [x], towards)
        sums = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
        for t in range(TOKENS):
            for i in range(EACH):
                if places[t, i] >= 0:
                    sums[t] += towards[places[t, i]].double()
        rounded_once(dx, sums, "gradient of tokens")
        copied, of_rows = K.take_weighted_rows(x, weights, pairs, places)
        for t, i in ((t, i) for t in range(TOKENS) for i in range(EACH) if places[t, i] >= 0):
            assert torch.equal(copied[places[t, i]], x[t]) and of_rows[places[t, i]] == weights[t, i]
        numbers = torch.randn(ROWS).to(dtype)
        dx, dweights = torch.autograd.grad((copied, of_rows), [x, weights], (towards, numbers))
        rounded_once(dx, sums, "gradient of tokens with weights")
        assert torch.equal(dweights, torch.where(places >= 0, numbers[places.clamp(min=0)], 0))


def test_no_tokens_and_no_rows() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    x = torch.zeros(0, 4, requires_grad=True)
    places = nothing.view(0, 2)
    K.sum_rows(K.take_rows(x, nothing, places), nothing, places, torch.zeros(0, 2)).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 4)
    some = torch.full((3, 2), -1)
    assert torch.equal(K.sum_rows(torch.zeros(0, 4), nothing, some, torch.ones(3, 2)), torch.zeros(3, 4))


def test_shapes_that_do_not_fit_are_refused() -> None:
    places, pairs = places_and_pairs()
    with pytest.raises(ValueError, match=r"places must be \[n, j\].*for 4 tokens"):
        K.take_rows(torch.zeros(4, 2), pairs, places)
    for y, rows in ((torch.zeros(TOKENS, 2), torch.zeros(ROWS, 3)), (torch.zeros(2, TOKENS).t(), torch.zeros(ROWS, 2))):
        with pytest.raises(ValueError, match="add_rows_ takes a contiguous"):
            K.add_rows_(y, rows, pairs, places)
    with pytest.raises(ValueError, match="rows must be"):
        K.sum_rows(torch.zeros(4, 2), pairs, places)
    with pytest.raises(ValueError, match=r"weights must be \[n, j\]"):
        K.take_weighted_rows(torch.zeros(TOKENS, 2), torch.zeros(TOKENS, 1), pairs, places)
    with pytest.raises(ValueError, match="weights"):
        K.sum_rows(torch.zeros(ROWS, 2), pairs, places, torch.zeros(TOKENS, 1))
