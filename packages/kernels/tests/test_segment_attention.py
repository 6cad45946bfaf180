"""Attention within segments is attention with their mask, with all gradients; keys that many see get the sum of theirs."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.kernels import Segment, Segments, segment_attention
from meshfold.kernels.segments import _by_number as numbers

CPU = torch.device("cpu")
ROWS = (
    # A prompt of 3 with completions of 4, 2 and 1, and padding.
    (Segment(0, 7, 0, 0), Segment(7, 9, 0, 3), Segment(9, 10, 0, 3), Segment(10, 12, 0, 0)),
    # A document; another whose prompt of 1 has two completions more.
    (Segment(0, 4, 0, 0), Segment(4, 6, 4, 0), Segment(6, 9, 4, 1), Segment(9, 12, 4, 1)),
    (Segment(0, 12, 0, 0),),
)


def tensors(kv_heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((3, 12, 4, 8), (3, 12, kv_heads, 8), (3, 12, kv_heads, 8))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_segments_are_attention_with_a_mask(kv_heads: int) -> None:
    segments, scale = Segments(ROWS, 12, CPU), 0.3
    q, k, v = tensors(kv_heads)
    found = segment_attention(q, k, v, segments, scale)
    seen = torch.zeros(3, 12, 12, dtype=torch.bool)
    for row, given in enumerate(ROWS):
        for one in given:
            for i in range(one.start, one.stop):
                for j in (*range(one.first, one.first + one.kept), *range(one.start, i + 1)):
                    seen[row, i, j] = True
    assert torch.equal(segments.seen(), seen)
    assert segments.pairs == int(seen.sum())
    given = (x.repeat_interleave(4 // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*given, attn_mask=seen[:, None], scale=scale).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_no_token_comes_twice_in_one_addition() -> None:
    packed = Segments(ROWS, 12, CPU).packed()
    assert len(packed.shared) == 2  # a prompt with two completions behind the first document
    for places, tokens in packed.shared:
        assert len(set(tokens.tolist())) == len(tokens)
        assert packed.keys[places].tolist() == tokens.tolist()
    assert packed.keys[packed.own].tolist() == list(range(36))
    assert (packed.most_queries, packed.most_keys) == (12, 12)


def test_narrow_dtypes_round_once() -> None:
    segments = Segments(ROWS, 12, CPU)
    q, k, v = (x.detach().bfloat16() for x in tensors(2))
    found = segment_attention(q, k, v, segments)
    exact = segment_attention(q.double(), k.double(), v.double(), segments)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=4e-3, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # rotary queries are wider than values there
        again = segment_attention(q.float(), k.float(), v, segments)
    assert torch.equal(again, found)


def test_segments_of_another_batch_are_refused() -> None:
    q, k, v = tensors(2)
    with pytest.raises(ValueError, match="segments of 3 rows, for 2"):
        segment_attention(q[:2], k[:2], v[:2], Segments(ROWS, 12, CPU))
    with pytest.raises(ValueError, match=r"rows of 12 tokens, for queries \[3, 11, 4, 8\]"):
        segment_attention(q[:, :11], k[:, :11], v[:, :11], Segments(ROWS, 12, CPU))


class Kernels(TorchDispatchMode):
    """Lists the operators that read or write elements: each is a launch on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.__name__:
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **kwargs or {})


class Still:
    """Attention whose results are its arguments, by no operators of its own."""

    def forward(self, q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])

    def backward(self, dout: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(x) for x in (dout, *others[1:3]))


@pytest.mark.parametrize(
    ("row", "forward", "backward"),
    [
        ((Segment(0, 8, 0, 0), Segment(8, 12, 0, 3)), ["index_select"] * 2, ["index_add_"] * 2 + ["index_select"] * 6),
        ((Segment(0, 5, 0, 0), Segment(5, 12, 0, 0)), [], []),
    ],
)
def test_operators_beside_the_kernel(
    monkeypatch: pytest.MonkeyPatch, row: tuple[Segment, ...], forward: list[str], backward: list[str]
) -> None:
    monkeypatch.setattr(sys.modules["meshfold.kernels.segment_attention"], "REFERENCE", Still())
    q, k, v = tensors(2)
    segments = Segments([row], 12, CPU)
    segments.of(3).packed()  # once a batch
    with Kernels() as in_forward:
        found = segment_attention(q, k, v, segments)
    weights = torch.ones_like(found)
    with Kernels() as in_backward:
        torch.autograd.grad(found, (q, k, v), weights)
    assert in_forward.names == forward
    assert sorted(in_backward.names) == backward


def test_segments_that_leave_a_token_out_are_refused() -> None:
    for row in ((Segment(0, 4, 0, 0), Segment(5, 12, 0, 0)), (Segment(0, 11, 0, 0),), ()):
        with pytest.raises(ValueError, match="of a row of 12 tokens: give them one behind the other, from 0 to 12"):
            Segments([row], 12, CPU)


def test_rows_that_are_all_alike() -> None:
    q, k, v = tensors(2)
    found = segment_attention(q, k, v, Segments(ROWS[:1], 12, CPU))
    assert torch.equal(found, segment_attention(q, k, v, Segments(ROWS[:1] * 3, 12, CPU)))


@pytest.mark.parametrize(("kv_heads", "masked"), [(4, False), (1, False), (2, True)])
def test_compiled_code_attends_within_the_segments_of_each_batch(
    kv_heads: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one graph, which takes their number: forward, all gradients, and a backward behind the end of the segments."""
    torch._dynamo.reset()
    if masked:  # as on a GPU in float32, which no kernel takes
        monkeypatch.setattr(sys.modules["meshfold.kernels.segment_attention"], "_kernel", lambda q, v: None)
    graphs: list[Any] = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    @torch.compile(backend=counted, fullgraph=True)
    def doubled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
        return 2 * segment_attention(q, k, v, segments, 0.3)

    before = len(numbers)
    for rows in (ROWS, ROWS[::-1], ROWS[1:2]):
        q, k, v = tensors(kv_heads)
        found = doubled(q, k, v, Segments(rows, 12, CPU))  # nothing but its backward needs them now
        expected = 2 * segment_attention(q, k, v, Segments(rows, 12, CPU), 0.3)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        weights = torch.randn_like(found)
        mine, theirs = (torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (found, expected))
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert len(graphs) == 1
    del found, expected, mine, theirs
    gc.collect()
    Segments(ROWS, 12, CPU)
    assert len(numbers) <= before + 1  # what no graph needs was released


def test_compiled_code_refuses_segments_of_another_batch() -> None:
    torch._dynamo.reset()
    q, k, v = tensors(2)
    compiled = torch.compile(segment_attention, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="segments of 3 rows, for 2"):
        compiled(q[:2], k[:2], v[:2], Segments(ROWS, 12, CPU))


def test_compiled_code_computes_in_the_dtype_of_autocast() -> None:
    torch._dynamo.reset()
    q, k, v = (x.detach().float() for x in tensors(2))
    segments = Segments(ROWS, 12, CPU)
    compiled = torch.compile(segment_attention, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = compiled(q, k, v, segments), segment_attention(q, k, v, segments)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention by lengths needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_code_calls_the_kernels_of_a_gpu(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(segment_attention, fullgraph=True)  # by a mask in float32
    for rows in (ROWS, ROWS[::-1]):
        segments = Segments(rows, 12, torch.device("cuda"))
        q, k, v = (x.detach().to("cuda", dtype).requires_grad_() for x in tensors(2))
        found, expected = compiled(q, k, v, segments), segment_attention(q, k, v, segments)
        close = dict(rtol=0, atol=0) if dtype is torch.bfloat16 else dict(rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(found, expected, **close)
        weights = torch.randn_like(found)
        for mine, theirs in zip(
            torch.autograd.grad(found, (q, k, v), weights),
            torch.autograd.grad(expected, (q, k, v), weights),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
