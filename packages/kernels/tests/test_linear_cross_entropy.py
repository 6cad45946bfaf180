"""Linear + cross entropy against the two steps one after the other: loss, every gradient, memory, shards, errors."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshfold.kernels import VocabularyShard, linear_cross_entropy, linear_log_probs, logit_chunks
from meshfold.kernels.cross_entropy import LossKernels, Terms
from meshfold.kernels.logit_chunks import (
    CHUNK_BYTES,
    LARGE_CHUNK_BYTES,
    ChunkSettings,
    LogitChunks,
    chunk_rows,
)

ROWS, WIDTH, WORDS = 13, 6, 37


def operands(
    dtype: torch.dtype = torch.float64, rows: int = ROWS, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(rows, WIDTH, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, WORDS, (rows,), generator=random)
    labels[1::4] = -100
    made = torch.randn(WORDS, generator=random, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return x, weight, labels, made


def expected_rows(x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, settings: dict[str, Any]) -> Tensor:
    """The loss of every row, from whole logits."""
    wide = [None if t is None else t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, weight, bias)]
    logits = F.linear(wide[0], wide[1], wide[2]) * settings.get("scale", 1.0)  # type: ignore[arg-type]
    if cap := settings.get("softcap", 0.0):
        logits = cap * torch.tanh(logits / cap)
    rows = F.cross_entropy(logits, labels, reduction="none", label_smoothing=settings.get("label_smoothing", 0.0))
    return rows + settings.get("z_loss", 0.0) * logits.logsumexp(-1).square() * (labels != -100)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all at once": dict(label_smoothing=0.1, z_loss=0.01, softcap=2.0, scale=0.7),
    "scale": dict(scale=3.0),
    "cap": dict(softcap=1.5),
    "smoothing": dict(label_smoothing=0.2),
    "z-loss": dict(z_loss=0.05),
}


@pytest.mark.parametrize("recompute", [False, True], ids=["in the forward", "in the backward"])
@pytest.mark.parametrize("chunk", [1, 5, 128])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_two_steps(case: str, chunk: int, recompute: bool) -> None:
    settings = CASES[case]
    for reduction in ("mean", "sum", "none"):
        x, weight, labels, bias = operands()
        leaves = [x, weight, bias]
        rows = expected_rows(x, weight, labels, bias, settings)
        upstream = torch.linspace(0.5, 2.0, ROWS, dtype=torch.float64)
        plain = (
            (rows * upstream).sum()
            if reduction == "none"
            else 3.0 * rows.sum() / ((labels != -100).sum() if reduction == "mean" else 1)
        )
        want = torch.autograd.grad(plain, leaves)  # type: ignore[arg-type]
        got = linear_cross_entropy(
            x,
            weight,
            labels,
            bias,
            chunk=chunk,
            reduction=reduction,
            recompute=recompute,
            **settings,  # type: ignore[arg-type]
        )
        loss = (got * upstream).sum() if reduction == "none" else 3.0 * got
        assert torch.allclose(loss, plain, rtol=1e-13)
        for name, one, other in zip(
            ("x", "weight", "bias"),
            torch.autograd.grad(loss, leaves),
            want,
            strict=True,  # type: ignore[arg-type]
        ):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-13), f"{reduction}: gradient of {name}"


def test_only_what_is_wanted_has_a_gradient() -> None:
    x, weight, labels, bias = operands()
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        leaves = [t.detach().requires_grad_(need) for t, need in zip((x, weight, bias), needs, strict=True)]  # type: ignore[union-attr]
        linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2]).backward()
        assert [leaf.grad is not None for leaf in leaves] == list(needs)
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, labels, bias).requires_grad


@pytest.mark.parametrize("recompute", [False, True])
def test_batches_of_rows_and_strides(recompute: bool) -> None:
    x, weight, labels, _ = operands(rows=12)
    batch = x.detach().view(3, 4, WIDTH).transpose(0, 1).requires_grad_()
    shaped = labels.view(3, 4).t()
    want = linear_cross_entropy(x, weight, labels, reduction="none", recompute=recompute)
    got = linear_cross_entropy(batch, weight, shaped, reduction="none", recompute=recompute)
    assert torch.equal(got, want.view(3, 4).t())
    wanted = torch.autograd.grad(want.sum(), x)[0]
    assert torch.allclose(torch.autograd.grad(got.sum(), batch)[0].transpose(0, 1).reshape(12, -1), wanted)


class LargestTensor(TorchDispatchMode):
    """Notes the largest number of elements that an operation returned, and counts matmuls."""

    largest, matmuls = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.matmuls += "mm" in str(func)
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return found


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
@pytest.mark.parametrize("recompute", [False, True])
def test_logits_are_never_whole(recompute: bool, settings: dict[str, Any]) -> None:
    rows, chunk = 64, 8
    x, weight, labels, bias = operands(rows=rows)
    with LargestTensor() as seen:
        linear_cross_entropy(x, weight, labels, bias, chunk=chunk, recompute=recompute, **settings).backward()
    # The reference of the gradient holds a chunk, its rows padded; nothing is larger, save what has the shape of an operand.
    assert seen.largest <= max(chunk * 48, rows * WIDTH, WORDS * WIDTH) < rows * WORDS


@pytest.mark.parametrize("recompute", [False, True])
def test_number_of_matmuls(recompute: bool) -> None:
    x, weight, labels, _ = operands(rows=64)
    with LargestTensor() as seen:
        loss = linear_cross_entropy(x, weight, labels, chunk=32, recompute=recompute)
    assert seen.matmuls == (2 if recompute else 6)
    with seen:
        loss.backward()
    assert seen.matmuls == (8 if recompute else 6)
    with torch.no_grad(), LargestTensor() as seen:
        linear_cross_entropy(x, weight, labels, chunk=32, recompute=recompute)
    assert seen.matmuls == 2
    with LargestTensor() as seen:
        linear_cross_entropy(x, weight.detach(), labels, chunk=32).backward()
    assert seen.matmuls == 4


def test_low_precision_is_as_exact_as_the_two_steps() -> None:
    exact = operands(torch.float64, rows=96)
    truth = torch.autograd.grad(expected_rows(*exact, {}).sum() / 72, exact[:2])
    x, weight, labels, bias = operands(torch.bfloat16, rows=96)
    plain = F.cross_entropy(F.linear(x, weight, bias).float(), labels)
    loss = linear_cross_entropy(x, weight, labels, bias, chunk=16)
    assert loss.dtype is torch.float32
    for got, two_steps, want in zip(
        torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(plain, (x, weight)), truth, strict=True
    ):
        error, allowed = (got.double() - want).norm(), (two_steps.double() - want).norm()
        assert error <= 2.0 * allowed


def test_half_precision_scales_before_it_rounds() -> None:
    """A gradient of 1e-8 a row is nothing in float16; with a loss scale in front of it, it is."""
    x, weight, labels, bias = operands(torch.float16)
    loss = linear_cross_entropy(x, weight, labels, bias) * 1e-4
    (loss * 65536.0).backward()
    exact = operands(torch.float64)
    (expected_rows(*exact, {}).sum() / int((labels != -100).sum()) * 1e-4 * 65536.0).backward()
    assert torch.allclose(weight.grad.double(), exact[1].grad, rtol=0.02, atol=1e-3)  # type: ignore[union-attr]


def test_nothing_counts() -> None:
    x, weight, labels, bias = operands()
    for rows in (slice(None), slice(0, 0)):
        loss = linear_cross_entropy(x[rows], weight, torch.full_like(labels, -100)[rows], bias)
        gradients = torch.autograd.grad(loss, (x, weight))
        assert loss == 0.0 and not any(g.any() for g in gradients)


def on_ranks(run: Any, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: int) -> list[Any]:
    """Call ``run(shard, x, block, offsets)`` on threads that are ranks, the last block of the vocabulary all padding."""
    padded = -(-WORDS // (blocks - 1)) + 1
    meeting, slots = threading.Barrier(blocks), [torch.zeros(0)] * blocks
    found: list[Any] = [None] * blocks

    def all_reduce(rank: int, how: Any) -> Any:
        def reduce(tensor: Tensor) -> Tensor:
            slots[rank] = tensor
            meeting.wait(150)
            result = how(torch.stack(slots))
            meeting.wait(150)
            return result  # type: ignore[no-any-return]

        return reduce

    def rank(number: int) -> None:
        start = number * padded
        valid = min(max(WORDS - start, 0), padded)
        block = torch.full((padded, WIDTH), 9.0, dtype=torch.float64)
        block[:valid] = weight[start : start + valid].detach()
        offsets = torch.zeros(padded, dtype=torch.float64)
        offsets[:valid] = bias[start : start + valid].detach()  # type: ignore[index]
        shard = VocabularyShard(
            start=start,
            valid=valid,
            size=WORDS,
            all_reduce_max=all_reduce(number, lambda t: t.amax(0)),
            all_reduce_sum=all_reduce(number, lambda t: t.sum(0)),
        )
        leaves = (t.detach().clone().requires_grad_() for t in (x, block, offsets))
        # Backward needs no communication, so ranks need not meet in it.
        found[number] = run(shard, *leaves)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(blocks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert None not in found
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("recompute", [False, True])
def test_vocabulary_over_ranks(recompute: bool) -> None:
    """Three ranks, one of them all padding: the loss on each, and gradients that are the parts of the whole."""
    x, weight, labels, bias = operands()
    settings: dict[str, Any] = dict(label_smoothing=0.1, z_loss=0.01, softcap=2.0, chunk=5, recompute=recompute)
    whole = linear_cross_entropy(x, weight, labels, bias, **settings)
    want = torch.autograd.grad(whole, (x, weight, bias))  # type: ignore[arg-type]

    def one(shard: VocabularyShard, *block: Tensor) -> Any:
        loss = linear_cross_entropy(block[0], block[1], labels, block[2], vocabulary=shard, **settings)
        return loss.detach(), torch.autograd.grad(loss, block), shard.valid

    losses, gradients, valid = zip(*on_ranks(one, x, weight, bias, 3), strict=True)
    assert 0 in valid and all(torch.allclose(loss, whole, rtol=1e-13) for loss in losses)
    assert torch.allclose(sum(g[0] for g in gradients), want[0], atol=1e-13)
    for i in (1, 2):
        parts = torch.cat([g[i][:n] for g, n in zip(gradients, valid, strict=True)])
        assert torch.allclose(parts, want[i], atol=1e-13)
        assert not any(g[i][n:].any() for g, n in zip(gradients, valid, strict=True))


def test_autocast_and_compile() -> None:
    x, weight, labels, bias = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels, bias)
    loss.backward()
    assert x.grad is not None and x.grad.dtype is torch.float32
    compiled = torch.compile(lambda *a: linear_cross_entropy(*a) * 2.0, backend="aot_eager")
    leaves = (x, weight, bias)
    want = torch.autograd.grad(linear_cross_entropy(x, weight, labels, bias) * 2.0, leaves)  # type: ignore[arg-type]
    got = torch.autograd.grad(compiled(x, weight, labels, bias), leaves)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))
    # Where values cannot be looked at, as on a GPU, a label that is no word makes the loss NaN.
    assert compiled(x, weight, labels.clamp(max=0).masked_fill(labels > 0, WORDS), bias).isnan()


def test_autocast_leaves_float64_alone() -> None:
    x, weight, labels, bias = operands()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels, bias)
    assert torch.equal(loss, linear_cross_entropy(x, weight, labels, bias))


def test_a_second_backward_is_refused() -> None:
    x, weight, labels, bias = operands()
    loss = linear_cross_entropy(x, weight, labels, bias)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="write recompute=True with retain_graph=True"):
        loss.backward()
    loss = linear_cross_entropy(x, weight, labels, bias, recompute=True)
    first, again = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_gradient_of_the_gradient_is_refused(recompute: bool) -> None:
    x, weight, labels, _ = operands()
    loss = linear_cross_entropy(x, weight, labels, recompute=recompute)
    (dx,) = torch.autograd.grad(loss * loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


def test_gradcheck() -> None:
    """Check logits made again: their backward may be called twice. The other way has the same gradients, as tested above."""
    x, weight, labels, bias = operands(rows=5)
    settings: dict[str, Any] = dict(CASES["all at once"], chunk=2, recompute=True)
    assert torch.autograd.gradcheck(
        lambda *leaves: linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], **settings),
        (x, weight, bias),
    )
    capped: dict[str, Any] = dict(softcap=2.0, scale=0.7, entropy=True, chunk=2)
    assert torch.autograd.gradcheck(
        lambda *leaves: linear_log_probs(leaves[0], leaves[1], labels, leaves[2], **capped), (x, weight, bias)
    )


def test_a_loss_that_shifts_its_labels() -> None:
    x, weight, labels, bias = operands(rows=12)
    labels = labels.masked_fill(labels == -100, 5).view(3, 4)
    got = linear_cross_entropy(x.view(3, 4, WIDTH), weight, labels, bias, shift=True)
    logits = F.linear(x, weight, bias).view(3, 4, WORDS)
    want = F.cross_entropy(logits[:, :-1].reshape(9, WORDS), labels[:, 1:].reshape(9))
    assert torch.allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_with_weights(reduction: Any) -> None:
    x, weight, labels, bias = operands()
    factors = torch.linspace(-1.0, 2.0, ROWS, dtype=torch.float64)
    factors[2] = 0.0
    rows = expected_rows(x, weight, labels, bias, {}) * factors
    want = rows.sum() / (labels != -100).sum() if reduction == "mean" else rows.sum()
    got = linear_cross_entropy(x, weight, labels, bias, row_weights=factors, reduction=reduction, chunk=4).sum()
    assert torch.allclose(got, want, rtol=1e-13)
    for one, other in zip(torch.autograd.grad(got, (x, weight)), torch.autograd.grad(want, (x, weight)), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_gradients_of_the_weight_added_up_in_float32() -> None:
    exact = operands(torch.float64, rows=96)
    (want,) = torch.autograd.grad(expected_rows(*exact, {}).sum() / 72, exact[1])
    x, weight, labels, bias = operands(torch.bfloat16, rows=96)
    error = {}
    for accumulate in (None, torch.float32):
        loss = linear_cross_entropy(x, weight, labels, bias, chunk=4, accumulate=accumulate)
        (got,) = torch.autograd.grad(loss, weight)
        assert got.dtype is torch.bfloat16
        error[accumulate] = (got.double() - want).norm()
    assert error[torch.float32] < error[None]


@pytest.mark.parametrize("shards", [1, 3])
def test_log_probs_and_entropy(shards: int) -> None:
    x, weight, labels, bias = operands()
    leaves = (x, weight, bias)
    logits = 2.0 * torch.tanh(0.7 * F.linear(x, weight, bias) / 2.0)
    every = logits.log_softmax(-1)
    counts = labels != -100
    towards = torch.linspace(-1.0, 1.0, 2 * ROWS, dtype=torch.float64).view(2, ROWS)
    want = (
        every.gather(1, labels.clamp(min=0)[:, None])[:, 0] * counts,
        -(every.exp() * every).sum(-1) * counts,
    )
    back = torch.autograd.grad(want, leaves, tuple(towards))  # type: ignore[arg-type]
    settings: dict[str, Any] = dict(softcap=2.0, scale=0.7, chunk=5)
    if shards == 1:
        found = [linear_log_probs(x, weight, labels, bias, entropy=True, **settings)]
        parts = [torch.autograd.grad(found[0], leaves, tuple(towards))]  # type: ignore[arg-type]
        alone = linear_log_probs(x, weight, labels, bias, **settings)
        assert alone[1] is None and torch.equal(alone[0], found[0][0])
    else:

        def one(shard: VocabularyShard, *block: Tensor) -> Any:
            got = linear_log_probs(block[0], block[1], labels, block[2], entropy=True, vocabulary=shard, **settings)
            return got, torch.autograd.grad(got, block, tuple(towards))

        found, parts = zip(*on_ranks(one, x, weight, bias, shards), strict=True)  # type: ignore[assignment]
    for got in found:
        for value, exact in zip(got, want, strict=True):
            assert torch.allclose(value, exact, rtol=1e-12)
    assert torch.allclose(sum(part[0] for part in parts), back[0], atol=1e-13)
    for i in (1, 2):
        assert torch.allclose(torch.cat([part[i] for part in parts])[:WORDS], back[i], atol=1e-13)


def test_rows_of_logits_begin_at_multiples_of_16_elements() -> None:
    x, weight, labels, _ = operands(torch.bfloat16)
    chunks = LogitChunks(
        x.detach(),
        weight.detach(),
        None,
        labels,
        ChunkSettings(
            terms=Terms(start=0, valid=WORDS, vocab_size=WORDS), kernels=LossKernels.of(x), reduction="sum", chunk=4
        ),
    )
    for at in chunks:
        logits = chunks.operands().dlogits
        assert logits.shape == (at.stop - at.start, WORDS) and logits.stride(0) % 16 == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_tensors_without_memory(recompute: bool) -> None:
    """As plans make them: shapes, and no look at the labels."""
    with FakeTensorMode():
        x, weight = (torch.ones(n, 8, requires_grad=True) for n in (5, 37))
        linear_cross_entropy(x, weight, torch.zeros(5, dtype=torch.int64), recompute=recompute).backward()
        assert x.grad is not None and weight.grad is not None
    x, weight = (torch.ones(n, 8, device="meta", requires_grad=True) for n in (5, 37))
    labels = torch.zeros(5, dtype=torch.int64, device="meta")
    linear_cross_entropy(x, weight, labels, recompute=recompute).backward()
    assert x.grad is not None and weight.grad is not None


@pytest.mark.parametrize(
    ("rows", "words", "item_bytes"),
    [(8192, 128_256, 2), (16384, 128_256, 2), (4096, 50_257, 4), (100, 32_000, 2), (7, 10, 8)],
)
def test_chunks_fit_and_are_even(rows: int, words: int, item_bytes: int) -> None:
    size = chunk_rows(rows, words, item_bytes)
    limit = CHUNK_BYTES if rows * words * item_bytes <= 8 * CHUNK_BYTES else LARGE_CHUNK_BYTES
    assert size * words * item_bytes <= max(limit, 128 * words * item_bytes)
    assert size % 128 == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.zeros(ROWS, WIDTH + 1, dtype=torch.float64)), "as many columns as the weight"),
        (dict(labels=torch.zeros(ROWS - 1, dtype=torch.int64)), r"one number a row, shape \[13\]; got \[12\]"),
        (dict(bias=torch.zeros(3)), r"bias must be \[37\], one number a word; got \[3\]"),
        (dict(x=torch.zeros(ROWS, WIDTH)), "x is torch.float32 and weight torch.float64"),
        (
            dict(labels=torch.full((ROWS,), 37)),
            "label 37 is outside the vocabulary of 37: labels are 0 to 36, or ignore_index=-100",
        ),
        (dict(labels=torch.zeros(ROWS, dtype=torch.int32)), "labels must be int64; got torch.int32: use labels.long"),
        (dict(bias=torch.zeros(37)), "x is torch.float64 and bias torch.float32"),
        (dict(row_weights=torch.ones(3)), r"row_weights must have one number a row, shape \[13\]; got \[3\]"),
        (dict(row_weights=torch.ones(ROWS, requires_grad=True)), "row_weights get no gradient"),
        (dict(accumulate=torch.bfloat16), "accumulate=torch.bfloat16 is narrower than the weight's torch.float64"),
        (dict(chunk=0), "chunk=0: give the number of rows at a time, 1 or more"),
        (dict(labels=torch.tensor(3), x=torch.zeros(WIDTH), shift=True), "labels of sequences"),
        (dict(reduction="average"), "reduction='average': use 'mean' or 'sum'"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    x, weight, labels, bias = operands()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**dict(x=x, weight=weight, labels=labels, bias=bias), **change})


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_an_odd_vocabulary_may_be_padded(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As for fast products on a GPU: words of 0 behind the weight change nothing, with a bias, in chunks and recomputed."""

    def found() -> list[Tensor]:
        gradients: list[Tensor] = []
        for bias in (True, False):
            for recompute in (False, True):
                given = operands(bias=bias)
                x, weight, labels, made = given
                loss = linear_cross_entropy(x, weight, labels, made, chunk=5, recompute=recompute, **settings)
                loss.backward()
                gradients += [
                    loss.detach(),
                    *(t.grad for t in (x, weight, made) if t is not None and t.grad is not None),
                ]
        return gradients

    plain = found()
    seen: list[int] = []
    monkeypatch.setattr(logit_chunks, "product_alignment", lambda weight: seen.append(weight.shape[0]) or 8)
    for padded, wanted in zip(found(), plain, strict=True):
        torch.testing.assert_close(padded, wanted, rtol=1e-12, atol=1e-12)
    assert len(plain) == 14 and seen[0] == WORDS


class Products(TorchDispatchMode):
    """Notes the sizes of the operands of products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.sizes += [tuple(x.shape) for x in args if isinstance(x, Tensor) and x.dim() == 2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True])
def test_no_product_of_an_odd_vocabulary_has_an_odd_side(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, gradients of rows and the gradient of the weight: on a GPU each would be several times slower."""
    monkeypatch.setattr(logit_chunks, "product_alignment", lambda weight: 8)
    x, weight, labels, made = operands(bias=bias)
    with Products() as products:
        linear_cross_entropy(x, weight, labels, made, chunk=5).backward()
    assert weight.grad is not None and weight.grad.shape == (WORDS, WIDTH)
    assert products.sizes and WORDS % 8
    assert not any(WORDS in sizes for sizes in products.sizes)
