"""Cross entropy against torch's own in float64, whole and with the vocabulary cut into shards."""

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
    return (3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def words(rows: int, vocabulary: int, seed: int = 0, ignored: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    if ignored and rows > 1:
        labels[rows // 2] = -100
    return labels


def exact(logits: Tensor, labels: Tensor, smoothing: float, z_loss: float) -> Tensor:
    loss = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    return loss + torch.where(labels == -100, 0.0, z_loss * logits.logsumexp(-1).square())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-2)])
@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropy(dtype: torch.dtype, smoothing: float, z_loss: float, inplace: bool, rounded_once: Check) -> None:
    logits, labels = seeded(7, 33, dtype=dtype), words(7, 33)
    leaf = logits.clone().requires_grad_()
    leaf64 = logits.double().requires_grad_()
    given = leaf * 1  # what may be overwritten is not a leaf
    loss = K.cross_entropy(given, labels, label_smoothing=smoothing, z_loss=z_loss, inplace_backward=inplace)
    wanted = exact(leaf64, labels, smoothing, z_loss)
    assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    rounded_once(loss, wanted, "loss")
    weights = seeded(7, dtype=loss.dtype, seed=3)
    (got,) = torch.autograd.grad(loss, leaf, weights)
    (back,) = torch.autograd.grad(wanted, leaf64, weights.double())
    rounded_once(got, back, "dlogits", slack=2)
    assert (got[labels == -100] == 0).all()
    assert torch.equal(given.detach(), got if inplace else logits)


def test_gradcheck_and_leading_dims() -> None:
    logits, labels = seeded(2, 3, 5).requires_grad_(), words(6, 5).view(2, 3)
    assert torch.autograd.gradcheck(lambda x: K.cross_entropy(x, labels, -100, 0.1, 1e-2), (logits,))
    assert K.cross_entropy(logits, labels).shape == (2, 3)


def test_a_second_backward_through_overwritten_logits_is_refused() -> None:
    leaf = seeded(3, 4).requires_grad_()
    loss = K.cross_entropy(leaf * 1, words(3, 4), inplace_backward=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def shards(logits: Tensor, cuts: list[int], padding: list[int]) -> list[tuple[int, int, Tensor]]:
    """(first word, words, logits with padding columns full of rubbish) for each shard."""
    out, start = [], 0
    for words_here, extra in zip(cuts, padding, strict=True):
        rubbish = torch.full((logits.shape[0], extra), 1e4, dtype=logits.dtype)
        out.append((start, words_here, torch.cat((logits[:, start : start + words_here], rubbish), -1)))
        start += words_here
    return out


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 6),
    cuts=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(lambda cuts: sum(cuts) > 1),
    extra=st.integers(0, 3),
    smoothing=st.sampled_from([0.0, 0.1]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    inplace=st.booleans(),
)
def test_pieces_add_up_to_the_whole(
    rows: int, cuts: list[int], extra: int, smoothing: float, z_loss: float, inplace: bool
) -> None:
    """Any cut of the vocabulary, empty shards and padding included, with max and sum where ranks would all-reduce."""
    vocabulary = sum(cuts)
    logits, labels = seeded(rows, vocabulary), words(rows, vocabulary)
    parts = shards(logits, cuts, [extra] * len(cuts))
    row_max = torch.stack([K.local_max(z, valid) for _, valid, z in parts]).amax(0)
    sums = torch.stack(
        [K.sum_exp_and_target(z, row_max, labels, start, valid, smoothing > 0) for start, valid, z in parts]
    ).sum(0)
    assert sums.shape == (3 if smoothing else 2, rows)
    loss = K.loss_per_row(row_max, sums, smoothing, z_loss, vocabulary)
    leaf = logits.clone().requires_grad_()
    wanted = exact(leaf, labels, smoothing, z_loss)
    counted = labels != -100
    torch.testing.assert_close(loss[counted], wanted.detach()[counted])
    grad = seeded(rows, seed=4)
    (back,) = torch.autograd.grad(wanted, leaf, grad)
    grad[~counted] = 0.0
    got = []
    for start, valid, z in parts:
        d = K.cross_entropy_backward(
            z, row_max, sums[0], labels, start, grad, smoothing, z_loss, vocabulary, valid, inplace
        )
        assert (d is z) is inplace and (d[:, valid:] == 0).all()
        got.append(d[:, :valid])
    torch.testing.assert_close(torch.cat(got, -1), back)


def test_minus_infinity_is_a_probability_of_zero() -> None:
    logits = seeded(3, 6)
    logits[:, 4:] = float("-inf")
    labels = torch.tensor([0, 1, 2])
    leaf, leaf64 = logits.clone().requires_grad_(), logits[:, :4].clone().requires_grad_()
    loss, wanted = K.cross_entropy(leaf, labels), exact(leaf64, labels, 0.0, 0.0)
    torch.testing.assert_close(loss, wanted)
    (got,), (back,) = torch.autograd.grad(loss.sum(), leaf), torch.autograd.grad(wanted.sum(), leaf64)
    torch.testing.assert_close(got, F.pad(back, (0, 2)))
    # A shard that holds nothing but -inf adds nothing.
    m = K.local_max(logits[:, 4:])
    assert (m == float("-inf")).all()
    for about in (m, torch.zeros_like(m)):  # of this shard, and of all
        sums = K.sum_exp_and_target(logits[:, 4:], about, labels, 4)
        assert torch.equal(sums[0], torch.zeros_like(m))


def test_logits_that_are_not_contiguous_are_overwritten_in_place() -> None:
    wide = seeded(6, 5)
    labels = words(5, 6)
    columns = wide.t()
    m = K.local_max(columns)
    sums = K.sum_exp_and_target(columns, m, labels, 0)
    wanted = K.cross_entropy_backward(columns, m, sums[0], labels, 0, torch.ones(5), 0.0, 0.0, 6)
    assert K.cross_entropy_backward(columns, m, sums[0], labels, 0, torch.ones(5), 0.0, 0.0, 6, inplace=True) is columns
    assert torch.equal(wide.t(), wanted)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="one number a row"):
        K.cross_entropy(seeded(3, 4), words(4, 4))
    with pytest.raises(ValueError, match="vocab_valid is 5, but there are 4"):
        K.local_max(seeded(3, 4), 5)
    with pytest.raises(K.KernelError, match="these functions have no backward"):
        K.local_max(seeded(3, 4).requires_grad_())
