"""Small models that drop half of what they make, with their dims in many orders."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, HIDDEN, HEADS = 12, 8, 2


class Mlp(nn.Module):
    """Its hidden is as wide, on each of two ranks, as the stream: widths alone do not tell one from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.inside, self.behind = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.behind(self.down(self.inside(F.gelu(self.up(self.norm(x))))))
        return x + y


class Attention(nn.Module):
    """Of ``s b h``, with heads beside the batch for torch's fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.num_heads, self.dropout = nn.LayerNorm(HIDDEN), HEADS, 0.5
        self.q_proj, self.k_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.v_proj, self.o_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.behind = nn.Dropout(0.5)

    def heads(self, x: Tensor, layer: nn.Module) -> Tensor:
        """``b heads s d``."""
        y: Tensor = layer(x).unflatten(-1, (-1, HIDDEN // HEADS)).permute(1, 2, 0, 3)
        return y

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (self.heads(y, layer) for layer in (self.q_proj, self.k_proj, self.v_proj))
        p = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        z: Tensor = self.behind(self.o_proj(out.permute(2, 0, 1, 3).flatten(2)))
        return x + z


class Merged(Attention):
    """Of ``b s h``, with heads in the batch's dim, and weights dropped there."""

    def heads(self, x: Tensor, layer: nn.Module) -> Tensor:
        """``b·heads s d``."""
        y: Tensor = layer(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2).flatten(0, 1)
        return y

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (self.heads(y, layer) for layer in (self.q_proj, self.k_proj, self.v_proj))
        out = (self.behind((q @ k.mT).softmax(-1)) @ v).view(x.shape[0], -1, *q.shape[1:])
        z: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return x + z


class ByHand(nn.Module):
    """Attention of one head, written by hand: of one row, batch and heads are dims of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.v_proj, self.o_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.behind, self.dropout, self.num_heads = nn.Dropout(0.5), 0.5, 1

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, self.num_heads, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        z: Tensor = self.behind(self.o_proj(y.transpose(1, 2).reshape(b, s, HIDDEN)))
        return x + F.dropout(z, self.dropout, self.training)


class Model(nn.Module):
    """Ids ``b s`` to logits ``b s words``."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, HIDDEN), nn.LayerNorm(HIDDEN)
        self.head, self.blocks = nn.Linear(HIDDEN, WORDS), nn.ModuleList(blocks)

    def run(self, x: Tensor) -> Tensor:
        """All blocks."""
        for block in self.blocks:
            x = block(x)
        return x

    def middle(self, x: Tensor) -> Tensor:
        """``b s h`` to the same."""
        return self.run(x)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.middle(self.embed(ids))))
        return y


class Named(Model):
    """Blocks in a dict."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"step_{number}": block for number, block in enumerate(blocks)})

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


class Turned(Model):
    """Tokens first, throughout."""

    def middle(self, x: Tensor) -> Tensor:
        return self.run(x.transpose(0, 1)).transpose(0, 1)


class Windows(Model):
    """Pairs of tokens in the batch's dim."""

    def middle(self, x: Tensor) -> Tensor:
        return self.run(x.unflatten(1, (-1, 2)).flatten(0, 1)).view(x.shape)


class Twice(Model):
    """Two views of each row, one batch behind the other."""

    def middle(self, x: Tensor) -> Tensor:
        one, other = self.run(torch.cat([x, 0.5 * x])).chunk(2)
        return one + other


class Chosen(Model):
    """Some tokens, by what they are."""

    def middle(self, x: Tensor) -> Tensor:
        y = self.run(x)
        return y + self.blocks[0](y[y[..., 0] > 0]).mean()


class Repeated(Model):
    """Each block repeated in backward, as a model's own code does it; the first one twice."""

    reentrant = False

    def run(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], *self.blocks):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Repeated):
    reentrant = True


class Kept(Repeated):
    """The same without."""

    def run(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], *self.blocks):
            x = block(x)
        return x


def torchs_own() -> nn.Module:
    """torch's layers as they are by default, ``s b h``."""
    return Turned(*(nn.TransformerEncoderLayer(HIDDEN, HEADS, 16, dropout=0.5) for _ in range(2)))


MODELS = {
    "mlp": lambda: Model(Mlp(), Mlp()),
    "turned": lambda: Turned(Mlp(), Mlp()),
    "torch's own": torchs_own,
    "attention": lambda: Turned(Attention(), Mlp(), Attention(), Mlp()),
    "merged": lambda: Model(Merged(), Mlp(), Merged(), Mlp()),
    "windows": lambda: Windows(Mlp(), Mlp()),
    "twice": lambda: Twice(Mlp(), Mlp()),
    "kept": lambda: Kept(Mlp(), Mlp()),
    "repeated": lambda: Repeated(Mlp(), Mlp()),
    "reentrant": lambda: Reentrant(Mlp(), Mlp()),
    "by hand": lambda: Model(ByHand(), Mlp(), ByHand(), Mlp()),
    "named": lambda: Named(ByHand(), ByHand()),
    "chosen": lambda: Chosen(Mlp(), Mlp()),
}
