"""A model's own code between split layers: exact, or refused with its line, under every mode. Never wrong in silence."""

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
from tensor_parallel_models import HIDDEN, Attention
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError
from meshfold.mesh.testing import ranks
from meshfold.tensor_parallel import parallelize

Code = Callable[[Tensor], Tensor]

STREAM: dict[str, tuple[Code, str]] = {
    # name: code on the stream ``b s h``, and how its refusal is quoted where the hidden dim is split
    "layer_norm": (lambda x: F.layer_norm(x, (x.shape[-1],)), "F.layer_norm(x"),
    "rms_norm": (lambda x: F.rms_norm(x, (x.shape[-1],)), "F.rms_norm(x"),
    "rms by hand": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), "x.pow(2).mean(-1"),
    "softmax": (lambda x: x.softmax(-1), "x.softmax(-1)"),
    "log_softmax": (lambda x: F.log_softmax(x, dim=-1), "F.log_softmax(x"),
    "mean": (lambda x: x - x.mean(-1, keepdim=True), "x.mean(-1"),
    "sum": (lambda x: x * x.sum(-1, keepdim=True), "x.sum(-1"),
    "max": (lambda x: x - x.amax(-1, keepdim=True), "x.amax(-1"),
    "var": (lambda x: x / (1 + x.var(-1, keepdim=True)), "x.var(-1"),
    "std": (lambda x: x / (1 + x.std(-1, keepdim=True)), "x.std(-1"),
    "normalize": (lambda x: F.normalize(x, dim=-1), "F.normalize(x"),
    "norm": (lambda x: x / x.norm(dim=-1, keepdim=True), "x.norm(dim=-1"),
    "logsumexp": (lambda x: x - x.logsumexp(-1, keepdim=True), "x.logsumexp(-1"),
    "cumsum": (lambda x: x.cumsum(-1), "x.cumsum(-1)"),
    "chunk": (lambda x: torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1), "x.chunk(2, -1)"),
    "half": (lambda x: F.pad(x[..., : x.shape[-1] // 2], (0, x.shape[-1] // 2)), "x[..., : x.shape"),
    "element": (lambda x: x * x[..., :1], "x * x[..., :1]"),
    "flip": (lambda x: x.flip(-1), "x.flip(-1)"),
    "roll": (lambda x: x.roll(1, -1), "x.roll(1, -1)"),
    "sort": (lambda x: x.sort(-1).values, "x.sort(-1)"),
    "topk": (lambda x: x * x.topk(1, -1).values, "x.topk(1"),
    "argmax": (lambda x: x + x.argmax(-1, keepdim=True), "x.argmax(-1"),
    "index": (lambda x: x[..., torch.arange(x.shape[-1]).flip(0)], "torch.arange(x.shape[-1]).flip(0)"),
    "einsum": (lambda x: torch.einsum("bsh,bth->bst", x, x) @ x, "torch.einsum("),
    "matmul": (lambda x: (x @ x.transpose(1, 2)) @ x, "x @ x.transpose(1, 2)"),
    "outer": (lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).sum(-1), "x.unsqueeze(-1) * x.unsqueeze(-2)"),
    "places": (lambda x: x + torch.arange(x.shape[-1]), "x + torch.arange(x.shape[-1])"),
    "interleave": (lambda x: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), ""),
    "halves": (lambda x: x.unflatten(-1, (2, -1)).flip(-2).flatten(-2), "x.unflatten(-1, (2, -1))"),
    "half means": (
        lambda x: x.unflatten(-1, (2, -1)).mean(-1).repeat(1, 1, x.shape[-1] // 2),
        "x.unflatten(-1, (2, -1))",
    ),
    "pool": (lambda x: x - F.max_pool1d(x, 3, 1, 1), "F.max_pool1d(x"),
    "group norm": (lambda x: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2), "F.group_norm(x"),
    "glu": (lambda x: F.glu(torch.cat([x, x], -1)), ""),
    "unknown": (lambda x: torch.fft.fft(x).real, "torch.fft.fft(x)"),
    "size": (lambda x: x / x.shape[-1], "x / x.shape[-1]"),
    "size in front": (lambda x: x.shape[-1] * x, "x.shape[-1] * x"),
    "root of a size": (lambda x: x * math.sqrt(x.size(-1)), "math.sqrt(x.size(-1))"),
    "power of a size": (lambda x: x * x.shape[-1] ** -0.5, "x.shape[-1] ** -0.5"),
    "whole mean": (lambda x: x - x.mean(), "x.mean()"),
    # element by element, or along tokens: exact wherever the tokens of a sequence stay together
    "gelu": (lambda x: F.gelu(x) * 0.5 + x.tanh(), ""),
    "where": (lambda x: torch.where(x > 0, x, 0.1 * x), ""),
    "clone": (lambda x: torch.zeros_like(x).add_(x).clamp(-1, 1), ""),
    "masked": (lambda x: x.masked_fill(torch.ones(x.shape[-1], dtype=torch.bool), 0.5) + x, ""),
}

TOKENS: dict[str, tuple[Code, str]] = {
    "shift": (lambda x: x + F.pad(x[:, :-1], (0, 0, 1, 0)), "x[:, :-1]"),
    "first": (lambda x: x + x[:, :1], "x + x[:, :1]"),
    "token mean": (lambda x: x - x.mean(1, keepdim=True), "x.mean(1"),
    "token cumsum": (lambda x: x.cumsum(1), "x.cumsum(1)"),
    "token flip": (lambda x: x.flip(1), "x.flip(1)"),
}


class Coded(nn.Module):
    """A block with attention, an MLP and code of its own on the stream."""

    def __init__(self, code: Code, hidden_code: Code | None = None) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(HIDDEN), Attention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.code, self.hidden_code = code, hidden_code

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        y = self.up(x)
        y = F.gelu(y) if self.hidden_code is None else self.hidden_code(y)
        return x + self.code(x) + self.down(y)


class Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(32, HIDDEN), nn.ModuleList([block])
        self.last, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def verdict(block: Callable[[], nn.Module], layout: Case) -> str:
    """``"exact"``, or the refusal; fails for what is neither."""
    mode, axes = layout
    mesh = mesh_of(axes)
    serial = seeded(lambda: Model(block()))
    model = copy.deepcopy(serial)
    parallelize(model, mesh, mode)
    ids = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(3))
    one = F.cross_entropy(serial(ids).flatten(0, 1), ids.flatten())
    one.backward()
    try:
        two = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    except LayoutError as error:
        assert all(p.grad is None for p in model.parameters())
        return str(error)
    two.backward()
    assert abs(float(one - two)) < 1e-9, f"{mode}: loss {float(two)} instead of {float(one)}"
    assert_gradients_equal(whole_gradients(model, mesh), gradients(serial), mode)
    return "exact"


GRID, SEQUENCE, LINE = case("2d", row=2, col=2), case("1d+sequence", tensor=4), case("1d", tensor=4)


def check(name: str, found: str, quoted: str) -> None:
    if not quoted:
        assert found == "exact", f"{name}: {found}"
        return
    assert found != "exact", f"{name} is exact"
    assert __file__ in found and quoted in found, f"{name}: {found}"
    assert "rules={" in found, f"{name}: {found}"


@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
@ranks(4)
def test_code_along_the_hidden_dim(turn: int) -> None:
    """Every sixth code; the slow sixths have the others."""
    for name, (code, quoted) in list(STREAM.items())[turn::6]:
        check(name, verdict(lambda code=code: Coded(code), GRID), quoted)


@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
@ranks(4)
def test_code_along_the_hidden_dim_is_exact_where_that_is_whole(turn: int) -> None:
    """Every sixth code: nothing of it is split here. The slow sixths have the others."""
    for name, (code, _) in list(STREAM.items())[(turn + 1) % 6 :: 6]:
        if name not in ("argmax", "places"):
            assert verdict(lambda code=code: Coded(code), LINE) == "exact", name


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@ranks(4)
def test_code_along_tokens(turn: int) -> None:
    """Every second code; the slow half has the others."""
    for name, (code, _) in list(TOKENS.items())[turn::2]:
        assert verdict(lambda code=code: Coded(code), GRID) == "exact", name
        found = verdict(lambda code=code: Coded(code), SEQUENCE)
        assert found != "exact" and __file__ in found, f"{name}: {found}"


HIDDEN_CODE: dict[str, tuple[Code, str]] = {
    "softmax": (lambda y: y.softmax(-1), "y.softmax(-1)"),
    "rms": (lambda y: F.rms_norm(y, (y.shape[-1],)), "F.rms_norm(y"),
    "max": (lambda y: y - y.amax(-1, keepdim=True), "y.amax(-1"),
    "swap": (lambda y: torch.cat(y.chunk(2, -1)[::-1], -1), "y.chunk(2, -1)"),
    "silu": (lambda y: F.silu(y) * y, ""),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", [LINE, GRID, case("3d", a=2, b=2, c=1)], ids=lambda layout: layout[0])
@ranks(4)
def test_code_on_what_column_layers_write(layout: Case) -> None:
    for name, (code, quoted) in HIDDEN_CODE.items():
        if layout[0] == "3d" and quoted:  # c, which splits it there, is 1
            continue
        check(name, verdict(lambda code=code: Coded(torch.tanh, code), layout), quoted)


@ranks(4)
def test_each_kind_of_call_is_looked_at_once() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Coded(torch.tanh)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            return x if self.training else x.softmax(-1)

    torch.manual_seed(0)
    model = Model(Moody()).double()
    parallelize(model, mesh_of(GRID[1]), "2d")
    ids = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        model(ids)
    with pytest.raises(LayoutError, match=r"x\.softmax\(-1\)"):
        model.eval()(ids)
    with pytest.raises(
        LayoutError, match=r"x\.softmax\(-1\)"
    ):  # again: a call that was refused is no call that was seen
        model(ids)
    model.train()(ids)


@ranks(4)
def test_a_module_of_torch_is_named() -> None:
    found = verdict(lambda: nn.Sequential(Coded(torch.tanh), nn.Softmax(-1)), GRID)
    assert "blocks.0.1 (Softmax)" in found and "rules={'blocks.*.*': 'replicate'}" in found, found
