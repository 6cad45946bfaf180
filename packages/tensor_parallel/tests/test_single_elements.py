"""Models of whose dims a rank has one element, a feature, a head, a row or a token: exact in float64, or refused with the line."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from tensor_parallel_checks import (
    Case,
    assert_gradients_equal,
    case,
    gradients,
    mesh_of,
    seeded,
    whole_gradients,
)
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError
from meshfold.mesh.testing import ranks
from meshfold.tensor_parallel import parallelize

Code = Callable[[Tensor], Tensor]
HIDDEN, WORDS = 4, 8


class Attention(nn.Module):
    """Four heads of one feature, or one of four."""

    def __init__(self, heads: int, how: str) -> None:
        super().__init__()
        self.num_heads, self.how = heads, how
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, self.num_heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.how == "torch":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "einsum":
            y = torch.einsum("bnts,bnsd->bntd", torch.einsum("bntd,bnsd->bnts", q, k).softmax(-1), v)
        else:
            y = (q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])).softmax(-1) @ v
        found: Tensor = self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        return found


class Block(nn.Module):
    def __init__(self, heads: int, how: str, code: Code) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(HIDDEN), Attention(heads, how)
        self.up, self.down = nn.Linear(HIDDEN, 4), nn.Linear(4, HIDDEN)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.code(x) + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, heads: int, how: str, code: Code) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, HIDDEN), nn.ModuleList([Block(heads, how, code)])
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


CODES: dict[str, Code] = {
    "tanh": torch.tanh,
    "size": lambda x: x * x.shape[-1],
    "float of a size": lambda x: x * (0.5 * x.shape[-1]),
    "mean by hand": lambda x: x.sum(-1, keepdim=True) / x.shape[-1] + x,
    "first feature": lambda x: x * x[..., :1],
    "first token": lambda x: x * x[:, :1],
    "first two tokens": lambda x: x + x[:, :2].sum(1, keepdim=True),
    "flat": lambda x: x.flatten(0, 1).tanh().view(x.shape),
    "turned": lambda x: x.transpose(0, 1).flatten(0, 1).sin().unflatten(0, (x.shape[1], -1)).transpose(0, 1),
    "row": lambda x: x.flatten(1).sin().view(x.shape),
    "dots": lambda x: x * torch.einsum("bth,bth->bt", x, x)[..., None],
    "scores": lambda x: torch.einsum("bth,bsh->bts", x, x).softmax(-1) @ x,
    "squeezed": lambda x: x * x.squeeze(-1).reshape(x.shape),
    "linear": lambda x: F.linear(x, torch.ones(HIDDEN, HIDDEN, dtype=x.dtype)),
    "ones": lambda x: x * torch.ones(x.shape[-1], dtype=x.dtype).sum(),
    "noise": lambda x: x + 0 * torch.rand_like(x),
}
WAYS = ("torch", "einsum", "hand")
LAYOUTS = {
    "1d": case("1d", tensor=4),
    "sequence": case("1d+sequence", tensor=4),
    "2d": case("2d", row=2, col=2),
    "columns": case("2d", row=1, col=4),
    "rows": case("2d", row=4, col=1),
    "3d": case("3d", a=2, b=2, c=1),
}


def verdict(layout: Case, heads: int, how: str, code: Code, rows: int, tokens: int) -> str:
    """``"exact"``, or the refusal; fails for what is neither."""
    mode, axes = layout
    mesh = mesh_of(axes)
    serial = seeded(lambda: Model(heads, how, code))
    model = copy.deepcopy(serial)
    ids = torch.randint(WORDS, (rows, tokens), generator=torch.Generator().manual_seed(3))
    try:
        parallelize(model, mesh, mode)
        found = model(ids)
    except LayoutError as error:
        return str(error)
    one, two = (F.cross_entropy(out.flatten(0, 1), ids.flatten()) for out in (serial(ids), found))
    one.backward()
    two.backward()
    assert abs(float(one - two)) < 1e-9, f"{mode}: loss {float(two)} instead of {float(one)}"
    assert_gradients_equal(whole_gradients(model, mesh), gradients(serial), mode)
    return "exact"


@pytest.mark.few(1)
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYOUTS)
@ranks(4)
def test_code_on_pieces_of_one_element(name: str, turn: int) -> None:
    """Each code under each layout, with one of the two numbers of rows; the slow half has the other one."""
    exact, place = 0, list(LAYOUTS).index(name)
    for number, (label, code) in enumerate(CODES.items()):
        rows, tokens = ((4, 4), (1, 4))[(number + place + turn) % 2]
        found = verdict(LAYOUTS[name], 4, "torch", code, rows, tokens)
        exact += found == "exact"
        told = found == "exact" or __file__ in found or rows == 1 or "rows" in found
        assert told, f"{label}, {rows} x {tokens}: {found}"
    assert exact >= 1


@pytest.mark.few(1)
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", WAYS)
@ranks(4)
def test_one_head_of_one_feature(how: str, turn: int) -> None:
    """Each layout with one of the two lengths; the slow half has the other one."""
    for number, name in enumerate(("1d", "sequence", "2d", "rows"), start=turn + WAYS.index(how)):
        rows, tokens = ((4, 4), (4, 6))[number % 2]
        found = verdict(LAYOUTS[name], 4, how, torch.tanh, rows, tokens)
        assert found == "exact", f"{name}, {rows} x {tokens}: {found}"
