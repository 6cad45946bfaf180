"""A layer of BERT as Megatron and the ring self-attention paper have it, over a flat stream of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import Mesh
from meshfold.models.attention import fused
from meshfold.sequence import attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
DROPOUT = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a BERT.

    Attributes:
        name: as the paper calls it.
        hidden: H, elements.
        heads: Z.
        layers: of the whole model.
        vocabulary: words, padded to a multiple of 128 as Megatron does.
        positions: longest sequence it was made for, tokens.
    """

    name: str
    hidden: int
    heads: int
    layers: int
    vocabulary: int = 30592
    positions: int = 512

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: twelve H² of weights, thirteen H of biases and norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the three embeddings; the head is the first of them."""
        return (self.vocabulary + self.positions + 2) * self.hidden


BASE = Shape(name="BERT-Base", hidden=768, heads=12, layers=12)
LARGE = Shape(name="BERT-Large", hidden=1024, heads=16, layers=24)


class SelfAttention(nn.Module):
    """``m h -> m h``: every token attends to all of its sequence; ``attend`` says how, None: with all scores in memory.

    ``n_heads`` and ``n_kv_heads`` are those of this module's own projection; who shards it sets them.
    """

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = self.n_kv_heads = heads
        self.head_dim = hidden // heads
        self.qkv = fused(nn.Linear(hidden, 3 * hidden), (hidden, hidden, hidden))
        self.out = nn.Linear(hidden, hidden)
        self.dropout = dropout
        self.attend: Attend | None = None

    def forward(self, x: Tensor, tokens: int) -> Tensor:
        """``tokens``: of a sequence, of those that this rank has."""
        parts = self.qkv(x).view(-1, tokens, 3 * self.n_heads, self.head_dim).split(self.n_heads, dim=2)
        attend = self.attend or self.all_scores
        out: Tensor = self.out(attend(*parts).flatten(2).flatten(0, 1))
        return out

    def all_scores(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``b s heads d -> b s heads d``, as Megatron had it in 2021: scores, softmax and dropout each a tensor."""
        batch, tokens = q.shape[:2]
        q, k, v = (x.transpose(1, 2).reshape(-1, tokens, self.head_dim) for x in (q, k, v))
        scores = torch.baddbmm(
            q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=self.head_dim**-0.5
        )  # scaled on the way, so that no scaled copy is kept
        weights = drop(F.softmax(scores, dim=-1), self.dropout, self.training)
        return torch.bmm(weights, v).view(batch, -1, tokens, self.head_dim).transpose(1, 2)


class Layer(nn.Module):
    """``m h -> m h``: attention and an MLP, each added to the stream and then normed, as in BERT."""

    def __init__(self, hidden: int, heads: int, dropout: float = DROPOUT) -> None:
        super().__init__()
        self.attn = SelfAttention(hidden, heads, dropout)
        self.norm1 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.dropout = dropout

    def forward(self, x: Tensor, tokens: int) -> Tensor:
        """``tokens``: of a sequence, of those that this rank has."""
        x = self.norm1(x + drop(self.attn(x, tokens), self.dropout, self.training))
        y = self.down(F.gelu(self.up(x)))
        z: Tensor = self.norm2(x + drop(y, self.dropout, self.training))
        return z


class Stack(nn.Module):
    """Layers, one behind the other: a stage of a pipeline without embeddings and head."""

    def __init__(self, hidden: int, heads: int, layers: int, dropout: float = DROPOUT) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, heads, dropout) for _ in range(layers))

    def forward(self, x: Tensor, tokens: int) -> Tensor:
        """``m h -> m h``."""
        for layer in self.layers:
            x = layer(x, tokens)
        return x


def drop(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout that keeps a mask of a byte an element, on every device."""
    if not training or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0]


def split_sequence(model: nn.Module, mesh: Mesh, mode: str) -> None:
    """From now on the model's attention runs over the ranks of the axis ``seq``; it drops no weights then."""
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.attend = partial(attention, mesh=mesh, mode=mode, causal=False)
