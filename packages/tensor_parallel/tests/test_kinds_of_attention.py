"""Kinds of attention that people's models have, by their norms and projections: those of one process in every mode."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tensor_parallel_checks import (
    WITHOUT_DATA,
    Case,
    assert_gradients_equal,
    case,
    gradients,
    mesh_of,
    seeded,
    two_of_them,
    whole_gradients,
)
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError
from meshfold.mesh.testing import run_on_ranks
from meshfold.tensor_parallel import parallelize

HEADS, KEY_HEADS, SIZE = 4, 2, 6
HIDDEN = HEADS * SIZE


class Normalised(nn.Module):
    """Norms of all heads come before the heads are told apart, others after."""

    def __init__(self, norm: Callable[[int, int], nn.Module], together: bool) -> None:
        super().__init__()
        self.head_dim, self.together = SIZE, together
        self.q_proj, self.o_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.k_proj, self.v_proj = (nn.Linear(HIDDEN, KEY_HEADS * SIZE) for _ in range(2))
        self.q_norm, self.k_norm = norm(HEADS, SIZE), norm(KEY_HEADS, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.together:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, SIZE)).transpose(1, 2) for y in (q, k, v))
        if not self.together:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class NormForEachHead(nn.Module):
    """As in StableLM: ``b n s size``."""

    def __init__(self, kind: type[nn.LayerNorm | nn.RMSNorm], heads: int, size: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(kind(size) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([norm(one) for norm, one in zip(self.norms, x.split(1, 1), strict=False)], 1)


class Product(nn.Linear):
    """Computes what nn.Linear does, in its own words."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T if self.bias is None else x @ self.weight.T + self.bias


class Grouped(nn.Module):
    """One projection for one key head after the other: its queries, key and value, as in Falcon."""

    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        size = HIDDEN // heads
        self.num_heads, self.num_kv_heads, self.head_dim = heads, key_heads, size
        self.query_key_value, self.dense = Product(HIDDEN, (heads + 2 * key_heads) * size), Product(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        groups = self.query_key_value(x).unflatten(-1, (-1, self.num_heads // self.num_kv_heads + 2, self.head_dim))
        q, k, v = groups[..., :-2, :], groups[..., [-2], :], groups[..., [-1], :]
        q, k, v = (y.expand(q.shape).flatten(2, 3).transpose(1, 2) for y in (q, k, v))
        return self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OneKey(Grouped):
    """A single group, which a rank has some queries of, and the key and value of all."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (self.num_heads + 2, self.head_dim))
        q, k, v = (y.transpose(1, 2) for y in (heads[..., :-2, :], heads[..., [-2], :], heads[..., [-1], :]))
        return self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(HIDDEN), attention

    def forward(self, x: Tensor, *biases: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), *biases)


class Model(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, HIDDEN), nn.Linear(HIDDEN, 32)
        self.blocks = nn.ModuleList([Block(attention())])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Biased(Normalised):
    """It adds biases ``(b h) q k`` or ``h q k`` of all heads to its scores."""

    def forward(self, x: Tensor, position_bias: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (
            y.unflatten(-1, (-1, SIZE)).transpose(1, 2) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        by_row = position_bias.shape[0] > q.shape[1]
        scores = q @ k.transpose(-1, -2) + (
            position_bias.view(*q.shape[:2], *position_bias.shape[1:]) if by_row else position_bias
        )
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ModelWithBiases(Model):
    """Its biases, slopes times distances, are made once and outside of its blocks, as ALiBi's are."""

    def __init__(self, by_row: bool) -> None:
        super().__init__(lambda: Biased(lambda heads, size: nn.Identity(), together=False))
        self.by_row = by_row
        self.register_buffer("slopes", torch.randn(HEADS))

    def forward(self, ids: Tensor) -> Tensor:
        x, places = self.embed(ids), torch.arange(ids.shape[1])
        biases = self.slopes[:, None, None] * (places[:, None] - places)
        biases = biases.repeat(x.shape[0], 1, 1) if self.by_row else biases
        for block in self.blocks:
            x = block(x, biases)
        return self.head(x)


class Crossed(Normalised):
    """Its keys and values are of another stream."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.q_proj(x), self.k_proj(context), self.v_proj(context)
        q, k, v = (y.unflatten(-1, (-1, SIZE)).transpose(1, 2) for y in (q, k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class ModelWithContext(Model):
    """The other stream has other tokens, and fewer."""

    def __init__(self) -> None:
        super().__init__(lambda: Crossed(lambda heads, size: nn.Identity(), together=False))

    def forward(self, ids: Tensor) -> Tensor:
        x, context = self.embed(ids), self.embed(ids[:, :5] + 1)
        for block in self.blocks:
            x = block(x, context)
        return self.head(x)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "RMSNorm of each head": lambda: Normalised(lambda heads, size: nn.RMSNorm(size), together=False),
    "RMSNorm of all heads": lambda: Normalised(lambda heads, size: nn.RMSNorm(heads * size), together=True),
    "LayerNorm of all heads": lambda: Normalised(lambda heads, size: nn.LayerNorm(heads * size), together=True),
    **{
        f"a {kind.__name__} for each head": lambda kind=kind: Normalised(
            lambda heads, size: NormForEachHead(kind, heads, size), together=False
        )
        for kind in (nn.LayerNorm, nn.RMSNorm)
    },
    "groups of heads": lambda: Grouped(8, 4),
    "one key head": lambda: OneKey(4, 1),
}


def made(kind: str) -> nn.Module:
    if kind == "another stream":
        return ModelWithContext()
    return ModelWithBiases("row" in kind) if "biases" in kind else Model(KINDS[kind])


def compare(kind: str, cases: tuple[Case, ...]) -> None:
    serial = seeded(lambda: made(kind))
    ids = torch.randint(31, (4, 6), generator=torch.Generator().manual_seed(3))
    wanted = F.cross_entropy(serial(ids).flatten(0, 1), ids.flatten())
    wanted.backward()
    for mode, axes in cases:
        model = copy.deepcopy(serial)
        model.zero_grad()
        parallelize(model, mesh_of(axes), mode)
        if kind == "another stream" and mode == "1d+tokens":
            with pytest.raises(LayoutError, match=r"Crossed.*two inputs of shapes .*attention='tokens'"):
                model(ids)
            continue
        found = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        found.backward()
        assert abs(float(found.detach() - wanted.detach())) < 1e-9, (kind, mode, axes)
        assert_gradients_equal(whole_gradients(model, mesh_of(axes)), gradients(serial), (kind, mode, axes))


NAMES = (*KINDS, "another stream", "biases of all heads", "biases of all heads for each row")
every_kind = pytest.mark.parametrize("kind", NAMES)


def quick(kind: str) -> tuple[Case, ...]:
    """Return what `make test` runs: attention by tokens, and of the modes that split heads two, others for the next kind."""
    return (*two_of_them(NAMES.index(kind)), case("1d+tokens", tensor=4))


@every_kind
def test_attention_is_that_of_one_process(kind: str) -> None:
    """With fewer key heads than ranks in 1d, whose norms count them once. The slow test below has the other modes."""
    run_on_ranks(4, compare, kind, quick(kind))


@pytest.mark.slow
@every_kind
def test_attention_is_that_of_one_process_in_the_other_modes(kind: str) -> None:
    run_on_ranks(4, compare, kind, tuple(one for one in WITHOUT_DATA[4] if one not in quick(kind)))
