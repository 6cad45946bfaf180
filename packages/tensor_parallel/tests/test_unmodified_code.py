"""Code as people write it: attention that takes its width off its input, and linear layers whose roles have to be said."""

from __future__ import annotations

import ast
import copy
import re

import pytest
import torch
from tensor_parallel_checks import CASES, Case, assert_gradients_equal, gradients, mesh_of, seeded, whole_gradients
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.testing import ranks
from meshfold.tensor_parallel import Mode, parallelize
from meshfold.tensor_parallel.convert.roles import ROLES

WORDS, HIDDEN, HEADS = 12, 16, 4
FOUR = CASES[4][:7]


class NanoAttention(nn.Module):
    """As in nanoGPT: every shape is made of that of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.n_head, self.n_embd = HEADS, HIDDEN

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(b, t, self.n_head, d // self.n_head).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, t, d))
        return out


class Gated(NanoAttention):
    """Reads its input beside the projections, so that a shape alone would not do."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.size()
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        out: Tensor = self.c_proj(y * x.sigmoid())
        return out


class Model(nn.Module):
    def __init__(self, attention: type[nn.Module] = NanoAttention) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.attention = nn.ModuleList(attention() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x))
        out: Tensor = self.head(x)
        return out


class Blocks(nn.Module):
    """The same in a list of blocks, which mode 1d + sequence splits."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(HIDDEN), NanoAttention()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.attention(self.norm(x))
            return y

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, WORDS)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


@pytest.mark.few(1)
@pytest.mark.parametrize("at", FOUR, ids=str)
@ranks(4)
def test_attention_may_take_its_width_off_its_input(at: Case) -> None:
    mode, axes = at
    ids = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(0))
    for make in (Blocks, Model):
        serial = seeded(make)
        wanted = F.cross_entropy(serial(ids).flatten(0, 1), ids.flatten())
        wanted.backward()
        if make is Model and mode == "1d+sequence":
            continue  # code between the blocks works on whole tokens there
        model, mesh = copy.deepcopy(serial), mesh_of(axes)
        model.zero_grad()
        parallelize(model, mesh, mode)
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        assert_gradients_equal({"loss": loss}, {"loss": wanted}, f"{mode} on {axes}")
        assert_gradients_equal(whole_gradients(model, mesh), gradients(serial), f"{mode} on {axes}")


def test_code_that_reads_the_input_too_is_refused_with_its_line() -> None:
    mesh = Mesh({"tensor": 2}, rank=0)
    with pytest.raises(LayoutError) as refused:
        parallelize(Model(Gated), mesh, "1d")
    text = str(refused.value)
    assert "at test_unmodified_code.py:" in text
    assert "`y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)`" in text
    assert "write -1 for it, as in y.reshape(b, t, -1)" in text
    assert "another order" not in text


# -- rules that are offered -----------------------------------------------------------------------------------------


class Squares(nn.Module):
    """Layers of one size in blocks."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.b(F.gelu(self.a(x)))
            return y

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Square() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


OFFERED = {
    "classes": (
        lambda: nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, 8)),
        {"0": "column", "2": "row"},
    ),
    "squares": (
        lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)),
        {"0": "column", "2": "row"},
    ),
    "blocks": (Squares, {"layers.*.a": "column", "layers.*.b": "row"}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("at", FOUR, ids=str)
@ranks(4)
def test_rules_for_pairs_of_linear_layers_are_offered_and_hold(at: Case) -> None:
    mode, axes = at
    x = torch.randn(4, 6, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, (make, wanted) in OFFERED.items():
        serial = seeded(make)
        serial(x).square().sum().backward()
        model, mesh = copy.deepcopy(serial), mesh_of(axes)
        model.zero_grad()
        with pytest.raises(LayoutError) as refused:
            parallelize(model, mesh, mode)
        text = str(refused.value)
        assert f"Roles are {', '.join(ROLES)}" in text
        rules = ast.literal_eval(text.partition("rules=")[2].partition("}")[0] + "}")
        assert rules == wanted, name
        parallelize(model, mesh, mode, rules=rules)
        model(x).square().sum().backward()
        assert_gradients_equal(whole_gradients(model, mesh), gradients(serial), f"{name}, {mode} on {axes}")


def test_no_rules_are_offered_where_none_are_known_to_work() -> None:
    odd = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    with pytest.raises(LayoutError, match=re.escape("rules={'name or pattern': role}")):
        parallelize(odd, Mesh({"tensor": 2}, rank=0), "1d")


def test_a_mode_of_ones_own_offers_rules_too() -> None:
    mine = Mode(
        name="mine",
        axes=("u",),
        residual="m h",
        column="k n:u",
        hidden="m n:u",
        row="k:u n",
        embedding="v:u h",
        ids="m v:u",
        head="k v:u",
        logits="m v:u",
    )
    with pytest.raises(LayoutError, match=re.escape('rules={"0": "column", "2": "row"}')):
        parallelize(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), Mesh({"u": 2}, rank=0), mine)
