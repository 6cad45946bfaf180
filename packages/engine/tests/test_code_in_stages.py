"""A model's own code at the beginning of a stage: what came from the stage before lies as it did there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh import CollectiveError, LayoutError
from meshfold.mesh.testing import close_pools, ranks, run_on_ranks

WORDS, HIDDEN = 11, 8

Code = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Code of its own, attention, an MLP."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code, self.num_heads = code, 2
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.code(x)
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.num_heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Model(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, WORDS)
        self.blocks = nn.ModuleList([Block(torch.tanh), Block(code)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch.flatten())


def verdict(spec: dict[str, Any], ids: Tensor, code: Code) -> str:
    """``"exact"``, or the refusal; fails for what is neither."""
    wanted = float(loss(Model(code).double()(ids), ids).detach())
    with Engine(
        Model(code).double(), spec, optimizer=dict(name="sgd", lr=0.1), precision="fp64", loss_fn=loss
    ) as engine:
        try:
            found = engine.train_step(engine.shard_batch(ids))
        except (LayoutError, CollectiveError) as error:  # of the ranks of another stage
            return str(error)
    assert abs(found - wanted) < 1e-9, f"{spec}: {found} instead of {wanted}"
    return "exact"


GRID = dict(tensor=dict(mode="2d", grid=[1, 2]))
LINE, DEALT = dict(tensor=2), dict(sequence=dict(mode="ring", size=2))


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def averaged(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


TWO: dict[str, Any] = dict(pipeline=dict(size=2, microbatches=2))
IDS = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(0))


@ranks(4)
def test_code_at_the_beginning_of_a_stage_is_exact_where_its_dims_are_whole() -> None:
    for split, code in ((LINE, normed), (DEALT, normed), (GRID, averaged), (LINE, averaged)):
        assert verdict({**TWO, **split}, IDS, code) == "exact"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("split", "code", "quoted"), [(GRID, normed, "x.square().mean(-1"), (DEALT, averaged, "x.mean(1")]
)
def test_code_at_the_beginning_of_a_stage_that_mixes_pieces_is_refused(
    split: dict[str, Any], code: Code, quoted: str
) -> None:
    try:
        found = run_on_ranks(4, verdict, {**TWO, **split}, IDS, code)
    finally:
        close_pools()  # ranks of the first stage were in the midst of an exchange
    for text in found:
        assert quoted in text and __file__ in text, text


class CallsBack(Model):
    """Calls a layer of its first block again behind its last, as DiT does its embedder of timesteps."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        first: Any = self.blocks[0]
        y: Tensor = self.head(x + first.proj(self.embed(ids)))
        return y


def check_a_layer_called_again(spec: dict[str, Any]) -> None:
    ids = torch.arange(12).view(4, 3) % WORDS
    serial = CallsBack(torch.tanh).double()
    loss(serial(ids), ids).backward()
    wanted = {name: p.detach() - p.grad for name, p in serial.named_parameters() if p.grad is not None}
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=1.0), precision="fp64", loss_fn=loss)
    with Engine(CallsBack(torch.tanh).double(), spec, **settings) as engine:
        engine.train_step(engine.shard_batch(ids))
        found = engine.full_state_dict()
    assert list(found) == list(serial.state_dict())
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize(
    "spec",
    [
        dict(pipeline=dict(size=2, microbatches=2)),
        pytest.param(dict(pipeline=2, zero=dict(stage=1)), marks=pytest.mark.slow),
    ],
    ids=["pipeline", "zero"],
)
def test_a_layer_of_the_first_block_that_is_called_again_behind_the_last(spec: dict[str, Any]) -> None:
    run_on_ranks(2, check_a_layer_called_again, spec)
