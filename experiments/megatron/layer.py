"""Megatron's transformer layer as operators for the planner's clock: matmuls, and the fused kernels between them.

A rank of tensor parallelism holds 1/t of heads and of the inner channels. Every operator reads its inputs and writes its outputs
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from meshfold.mesh.model_io import Operator
from meshfold.planner.clock import Work

HALF = 2  # bytes
MASK = 1  # of dropout


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer and what it works on.

    Attributes:
        hidden: channels.
        heads: of attention.
        sequence: tokens.
        rows: sequences of a micro-batch.
        tensor: ranks that share the layer.
        sequence_parallel: norms and dropout outside of the shared part are split over these ranks, too.
        flash: attention is one kernel, which stores no scores.
        window: tokens that a token attends to, with ``flash``; 0: all before it.
        parallel_block: attention and MLP read the same norm, one beside the other.
    """

    hidden: int
    heads: int
    sequence: int
    rows: int
    tensor: int
    sequence_parallel: bool = False
    flash: bool = False
    window: int = 0
    parallel_block: bool = False

    @property
    def visible(self) -> float:
        """Share of all pairs of tokens that attention computes in a kernel: those of a causal mask, within the window."""
        share = (self.window or self.sequence) / self.sequence
        return share * (1 - share / 2)

    @property
    def norms(self) -> int:
        """Norms of a layer."""
        return 1 if self.parallel_block else 2

    @property
    def stream(self) -> int:
        """Elements of the residual stream."""
        return self.rows * self.sequence * self.hidden

    @property
    def outside(self) -> int:
        """Elements that a rank has of it outside of the shared part."""
        return self.stream // (self.tensor if self.sequence_parallel else 1)

    @property
    def scores(self) -> int:
        """Scores on a rank."""
        return self.rows * self.heads * self.sequence**2 // self.tensor


def matmul(m: int, k: int, n: int, count: int = 1) -> Operator:
    """A product of half-precision matrices, ``count`` of them in one operator."""
    return Operator(2 * m * k * n * count, HALF * count * (m * k + k * n + m * n))


def move(*, half: int = 0, masks: int = 0) -> Operator:
    """A kernel without products, by the elements that it reads and writes."""
    return Operator(0, HALF * half + MASK * masks)


def products(shape: Shape) -> list[tuple[int, int, int, int]]:
    """Sizes (m, k, n, count) of the products with weights: QKV, output, up, down."""
    tokens, h, t = shape.rows * shape.sequence, shape.hidden, shape.tensor
    return [(tokens, h, 3 * h // t, 1), (tokens, h // t, h, 1), (tokens, h, 4 * h // t, 1), (tokens, 4 * h // t, h, 1)]


def attention(shape: Shape) -> list[tuple[int, int, int, int]]:
    """Sizes of both products of attention, of all heads of a rank."""
    s, d, count = shape.sequence, shape.hidden // shape.heads, shape.rows * shape.heads // shape.tensor
    return [(s, d, s, count), (s, s, d, count)]


def core_forward(shape: Shape) -> list[Operator]:
    """Attention between its projections: products, softmax with scale and mask, dropout of scores; or one kernel for all."""
    if shape.flash:
        flop = sum(matmul(*sizes).flop for sizes in attention(shape))
        return [Operator(flop, HALF * 4 * shape.stream // shape.tensor, shape.hidden // shape.heads, shape.visible)]
    softmax, dropout = move(half=2 * shape.scores), move(half=2 * shape.scores, masks=shape.scores)
    return [*(matmul(*sizes) for sizes in attention(shape)), softmax, dropout]


def core_backward(shape: Shape) -> list[Operator]:
    """The backward of :func:`core_forward`."""
    if shape.flash:  # five products in place of two
        (forward,) = core_forward(shape)
        return [Operator(forward.flop * 5 // 2, 2 * forward.bytes, forward.head_dim, forward.computed)]
    softmax, dropout = move(half=3 * shape.scores), move(half=2 * shape.scores, masks=shape.scores)
    return [*_both_gradients(attention(shape)), softmax, dropout]


def forward(shape: Shape) -> Work:
    """Forward of a layer: two norms, four products, attention, GELU with bias, two times bias, dropout and addition."""
    inner, outside = 4 * shape.stream // shape.tensor, shape.outside
    norms = [move(half=2 * outside)] * shape.norms
    residual = [move(half=3 * outside, masks=outside)] * shape.norms
    gelu = [move(half=2 * inner)]
    return _work([*(matmul(*one) for one in products(shape)), *core_forward(shape), *norms, *residual, *gelu])


def backward(shape: Shape) -> Work:
    """Backward of a layer, without what recomputation runs again."""
    inner, outside = 4 * shape.stream // shape.tensor, shape.outside
    norms = [move(half=4 * outside)] * shape.norms  # x, dy and the residual's gradient in, dx out
    residual = [move(half=2 * outside, masks=outside)] * shape.norms
    gelu = [move(half=3 * inner)]
    return _work([*_both_gradients(products(shape)), *core_backward(shape), *norms, *residual, *gelu])


def head(shape: Shape, vocabulary: int) -> Work:
    """Forward and backward of the head and its loss: the logits in half precision, softmax in single."""
    tokens, mine = shape.rows * shape.sequence, vocabulary // shape.tensor
    sizes = (tokens, shape.hidden, mine, 1)
    return _work([matmul(*sizes), *_both_gradients([sizes]), move(half=10 * tokens * mine)])


def _both_gradients(sizes: Iterable[tuple[int, int, int, int]]) -> list[Operator]:
    found = []
    for m, k, n, count in sizes:
        found += [matmul(m, n, k, count), matmul(k, m, n, count)]
    return found


def _work(operators: Iterable[Operator]) -> Work:
    return Work(operators=Counter(operators))
