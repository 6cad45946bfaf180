"""gpt-fast's decoding, written by hand: it is a repository, not a package.

As there (github.com/meta-pytorch/gpt-fast, model.py and generate.py): keys and values in static caches, one token compiled whole by
``torch.compile(mode="reduce-overhead", fullgraph=True)`` with Inductor's ``coordinate_descent_tuning``, a prompt in one eager call.
The next token is the likeliest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TUNED = dict(coordinate_descent_tuning=True)
"""Settings of Inductor."""


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Block(nn.Module):
    """Attention over a cache, and a gated MLP."""

    keys: Tensor
    values: Tensor

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, batch: int, longest: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads, hidden // heads
        self.wqkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.d, bias=False)
        self.wo, self.w2 = nn.Linear(heads * self.d, hidden, bias=False), nn.Linear(ffn, hidden, bias=False)
        self.w1, self.w3 = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.attention_norm, self.ffn_norm = Norm(hidden), Norm(hidden)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, kv_heads, longest, self.d), persistent=False)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Return ``b s h``; table ``s d/2 2``, mask ``1 1 s longest``."""
        b, s, _ = x.shape
        sizes = [count * self.d for count in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (each.view(b, s, -1, self.d) for each in self.wqkv(self.attention_norm(x)).split(sizes, -1))
        q, k, v = (each.transpose(1, 2) for each in (turned(q, table), turned(k, table), v))
        self.keys[:, :, positions], self.values[:, :, positions] = k, v
        y = F.scaled_dot_product_attention(
            q, self.keys, self.values, attn_mask=mask, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.wo(y.transpose(1, 2).reshape(b, s, -1))
        z = self.ffn_norm(x)
        found: Tensor = x + self.w2(F.silu(self.w1(z)) * self.w3(z))
        return found


def turned(x: Tensor, table: Tensor) -> Tensor:
    """Return heads ``b s heads d`` turned by their positions: neighbours in a head are a pair."""
    pairs = x.float().unflatten(-1, (-1, 2))
    cos, sin = table[:, None, :, 0], table[:, None, :, 1]
    first, second = pairs.unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(3).type_as(x)


class Decoder(nn.Module):
    """The whole model, with caches for so many sequences and tokens."""

    table: Tensor
    mask: Tensor

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        layers: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        *,
        batch: int,
        longest: int,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, kv_heads, ffn, batch, longest) for _ in range(layers))
        self.norm, self.output = Norm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        half = torch.arange(0, hidden // heads, 2, dtype=torch.float32) / (hidden // heads)
        angles = torch.outer(torch.arange(longest, dtype=torch.float32), 10_000.0**-half)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin()), -1), persistent=False)
        self.register_buffer("mask", torch.ones(longest, longest, dtype=torch.bool).tril(), persistent=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return logits ``b s v`` of ids ``b s`` at positions ``s``."""
        x, table, mask = self.embed(ids), self.table[positions], self.mask[None, None, positions]
        for block in self.blocks:
            x = block(x, table, mask, positions)
        found: Tensor = self.output(self.norm(x))
        return found


def next_of(model: Decoder, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the likeliest next tokens ``b 1``."""
    logits: Tensor = model(ids, positions)
    return logits[:, -1].argmax(-1, keepdim=True)


def generator(model: Decoder, backend: str) -> Callable[[Tensor, int], Tensor]:
    """Return a function that continues prompts ``b s`` by so many tokens: ``b new``."""
    mode = "reduce-overhead" if backend == "inductor" and torch.cuda.is_available() else None
    one = torch.compile(next_of, fullgraph=True, backend=backend, mode=mode)

    @torch.no_grad()
    def generate(ids: Tensor, new: int) -> Tensor:
        from torch._inductor import config

        with config.patch(TUNED):
            token = next_of(model, ids, torch.arange(ids.shape[1], device=ids.device))
            at = torch.tensor([ids.shape[1]], device=ids.device)
            found = [token]
            for _ in range(new - 1):
                token = one(model, token.clone(), at).clone()  # a replay overwrites what the one before returned
                found.append(token)
                at += 1
        return torch.cat(found, 1)

    return generate
