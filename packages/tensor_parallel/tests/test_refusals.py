"""What cannot be placed or split is refused before anything is changed, with what would work."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tensor_parallel_models import HIDDEN, Attention, Block, Classic, Flat, GatedMLP, ViT, mlp
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError, Mesh, Part
from meshfold.mesh.testing import fake_world
from meshfold.tensor_parallel import (
    Embedding,
    LayerNorm,
    Linear,
    Mode,
    RMSNorm,
    cross_entropy,
    find_mode,
    parallelize,
)
from meshfold.tensor_parallel.layers.base import BatchShape
from meshfold.tensor_parallel.layers.embedding import PositionEmbedding

FOUR, EIGHT = Mesh({"tensor": 4}, rank=1), Mesh({"tensor": 8}, rank=1)
SQUARE = Mesh({"row": 2, "col": 2}, rank=1)
CUBE = Mesh({"a": 2, "b": 4, "c": 2}, rank=1)


class Model(nn.Module):
    """A model of these submodules; never run."""

    def __init__(self, **submodules: nn.Module) -> None:
        super().__init__()
        for name, module in submodules.items():
            self.add_module(name, module)


def decoder(**more: nn.Module) -> Model:
    """Something to split, beside what cannot be."""
    return Model(embed=nn.Embedding(32, HIDDEN), block=Block(), **more)


class NormsByHead(nn.Module):
    """A norm for each head, which lie in a dim."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.dim, self.norms = dim, nn.ModuleList(nn.LayerNorm(4) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([norm(y) for norm, y in zip(self.norms, x.split(1, self.dim), strict=False)], self.dim)


class InGroups(nn.Module):
    """Two groups of two queries, a key and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = 4, 2
        self.query_key_value, self.dense = nn.Linear(HIDDEN, 32), nn.Linear(HIDDEN, HIDDEN)


class OwnAttention(nn.MultiheadAttention):
    """Derived, so that it may have another forward."""


class GroupedAttention(nn.Module):
    def __init__(self, heads: int, kv_heads: int, head_dim: int = 4, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim)
        self.k_proj, self.v_proj = (nn.Linear(hidden, kv_heads * head_dim) for _ in range(2))
        self.o_proj = nn.Linear(heads * head_dim, hidden)


def attention_with(**more: nn.Module) -> Model:
    """Attention with four heads of four elements, and other layers inside of it."""
    model = Model(norm=nn.LayerNorm(HIDDEN), attn=GroupedAttention(4, 4))
    for name, module in more.items():
        model.get_submodule("attn").add_module(name, module)
    return model


class Alibi(Attention):
    """Slopes of its own heads, counted from zero on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        far = torch.arange(x.shape[1])[None, None, :] * (1.0 + torch.arange(self.num_heads))[:, None, None]
        y = (q @ k.transpose(-1, -2) - far).softmax(-1) @ v
        return self.out_proj(y.transpose(1, 2).flatten(2))


class Swapped(nn.Module):
    """A fused projection of keys, values, queries of each head, all of them read by position among all heads."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.out_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1)).transpose(1, 2).unbind(3)
        return self.out_proj(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Headless(nn.Module):
    """It takes queries, keys and values at places of the whole projection: a rank's share has no values, so no heads of them."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.out_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, 4)).transpose(1, 2) if part.numel() else x.new_zeros(len(x), 0, x.shape[1], 4)
            for part in (self.qkv(x)[..., i * HIDDEN : (i + 1) * HIDDEN] for i in range(3))
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Biased(Attention):
    """It takes biases of all heads, and cannot be tried without its last argument."""

    def forward(self, x: Tensor, position_bias: Tensor, angles: Tensor) -> Tensor:
        return super().forward(x * angles.cos())


class Configured(Attention):
    """It reads how many heads there are from a configuration, and cannot be tried without its second argument."""

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.config.num_attention_heads, -1)) * angles.cos()
        return self.out_proj((q * self.k_proj(x) * self.v_proj(x)).flatten(2))


class TakesResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x * self.mix + residual


class Nameless(nn.Module):
    """Attention that does not tell its number of heads."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        if fused:
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out_proj = nn.Linear(HIDDEN, HIDDEN)


class SquaredRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight**2


class ScaledLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class LowRank(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class RampEmbedding(nn.Embedding):
    """Multiplies each column by another number."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * torch.linspace(1.0, 2.0, self.embedding_dim)


class FlatBlock(nn.Module):
    """Attention, MLP and norms in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 4
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)


class Bare(nn.Module):
    """A parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.cls = Block(), nn.Parameter(torch.zeros(HIDDEN))


def tied_wrongly() -> nn.Module:
    model = Model(a=GatedMLP(), b=GatedMLP())
    model.a.gate = nn.Linear(HIDDEN, HIDDEN)
    model.a.up = nn.Linear(HIDDEN, HIDDEN)
    model.a.down = nn.Linear(HIDDEN, HIDDEN)
    model.b.gate.weight = model.a.gate.weight
    model.b.gate = nn.Linear(HIDDEN, HIDDEN)
    model.b.gate.weight = model.a.down.weight
    model.b.up, model.b.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    return model


@dataclass(frozen=True)
class Refusal:
    """A model, where it is to be split, and what the message must say."""

    make: Callable[[], nn.Module]
    says: tuple[str, ...]
    mesh: Mesh = FOUR
    mode: Any = "1d"
    settings: dict[str, Any] = field(default_factory=dict)


REFUSALS: dict[str, Refusal] = {
    # sizes
    "heads": Refusal(lambda: Attention(24, 6), ("6 attention heads", "over tensor (4 blocks)", "4 or 8")),
    "fewer heads than ranks": Refusal(
        lambda: Attention(16, 4), ("4 attention heads", "multiple of 8 heads, such as 8"), EIGHT
    ),
    "heads in 2d": Refusal(
        lambda: Attention(15, 3), ("3 attention heads", "over col (2 blocks)", "2 or 4"), SQUARE, "2d"
    ),
    "key/value heads": Refusal(
        lambda: Model(attn=GroupedAttention(12, 3)), ("attn: 3 key/value heads", "divides 4 or is a multiple of it")
    ),
    "fused heads": Refusal(lambda: Model(attn=Nameless(True)), ("attn: cannot tell the heads", "num_heads", "48")),
    "unknown heads": Refusal(
        lambda: Model(attn=Nameless(False)), ("attn: cannot tell its number of heads", "head_dim")
    ),
    "hidden": Refusal(
        lambda: nn.Sequential(nn.Linear(9, 12), nn.GELU(), nn.Linear(12, 9)),
        ("0: in_features=9", "over col (2 blocks)", "8 or 10"),
        SQUARE,
        "2d",
    ),
    "inner": Refusal(
        lambda: nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 8)),
        ("0: out_features=10", "multiple of 4", "8 or 12"),
    ),
    "hidden of an embedding": Refusal(
        lambda: Model(embed=nn.Embedding(10, 9), up=nn.Linear(9, 16), down=nn.Linear(16, 9)),
        ("embed: embedding_dim=9", "8 or 10"),
        SQUARE,
        "2d",
    ),
    "hidden in 3d": Refusal(mlp, (), Mesh({"a": 2, "b": 3, "c": 1}, rank=0), "3d"),
    "halves of gate and up": Refusal(
        lambda: Model(mlp=nn.Sequential(nn.Linear(8, 20), nn.Linear(10, 8))),
        ("mlp.0: a part of 10", "multiple of 4", "8 or 12"),
        settings=dict(rules={"mlp.0": "column", "mlp.1": "row"}),
    ),
    "channels of patches": Refusal(
        lambda: Model(patch=nn.Conv2d(3, 9, 2, 2), norm=nn.LayerNorm(9)),
        ("patch: out_channels=9", "8 or 10"),
        SQUARE,
        "2d",
    ),
    # kinds of modules
    "nn.MultiheadAttention of another width": Refusal(
        lambda: decoder(attn=nn.MultiheadAttention(8, 4)),
        ("attn: MultiheadAttention is 8 wide, not 16 like the residual stream",),
    ),
    "a MultiheadAttention of one's own": Refusal(
        lambda: decoder(attn=OwnAttention(HIDDEN, 4)), ("attn: OwnAttention hides its projections", "q_proj")
    ),
    "unknown module": Refusal(
        lambda: decoder(mix=nn.Bilinear(4, 4, 4)), ("mix: Bilinear has parameters", "weight", "replicate")
    ),
    "bare parameter": Refusal(Bare, ("(root): Bare has parameters of its own (cls)",)),
    "square layers without names": Refusal(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
        ("0: Linear(8, 8)", "neither its name nor its shape"),
    ),
    "nothing": Refusal(lambda: nn.Sequential(nn.ReLU()), ("nothing to split in Sequential",)),
    "a single layer": Refusal(lambda: nn.Linear(8, 8), ("rules=",)),
    "a single layer with a rule": Refusal(
        lambda: nn.Linear(8, 8), ("single layer", "nn.Sequential(layer)"), settings=dict(rules={"": "column"})
    ),
    "batch norm": Refusal(
        lambda: decoder(norm=nn.BatchNorm1d(HIDDEN, affine=False)), ("norm: BatchNorm1d has statistics",)
    ),
    "group norm": Refusal(lambda: decoder(norm=nn.GroupNorm(2, HIDDEN)), ("norm: GroupNorm has statistics",)),
    "norm over two dims": Refusal(
        lambda: decoder(norm=nn.LayerNorm((4, HIDDEN))), ("norm: LayerNorm normalises over several dims",)
    ),
    "norm of another size": Refusal(lambda: decoder(odd=nn.LayerNorm(4)), ("odd: LayerNorm of size 4", "16 wide")),
    "norm of heads outside of attention": Refusal(
        lambda: decoder(q_norm=nn.RMSNorm(HIDDEN)), ("q_norm: a norm of heads must be a child", "rule 'norm'")
    ),
    "norm over some heads": Refusal(
        lambda: attention_with(q_norm=nn.RMSNorm(8)),
        ("attn.q_norm: normalises 8 elements", "a head of 4", "all 4 or", "'attn': 'replicate'"),
    ),
    "groups of heads that cannot be split": Refusal(
        lambda: Model(attn=InGroups()),
        ("attn: 2 groups of 2 queries", "tensor (4 blocks)", "'attn': 'replicate'"),
    ),
    "norms for another number of heads": Refusal(
        lambda: attention_with(q_norm=NormsByHead(3, 1)),
        ("attn.q_norm: has 3 norms of 4 elements", "4 heads", "'attn': 'replicate'"),
    ),
    "norms of heads in another dim": Refusal(
        lambda: attention_with(q_norm=NormsByHead(4, 2)),
        (
            "attn.q_norm: NormsByHead does not give each of its 4 norms",
            "the second of four dims",
            "'attn': 'replicate'",
        ),
    ),
    "whole norm of heads": Refusal(
        lambda: attention_with(q_norm=nn.RMSNorm(4)),
        ("attn.q_norm cannot stay whole", "'head_norm'"),
        settings=dict(rules={"*.q_norm": "replicate"}),
    ),
    "whole layer on heads": Refusal(
        lambda: attention_with(mix=nn.Bilinear(4, 4, 4)),
        ("attn.mix cannot stay whole", "there is none", "'attn': 'replicate'"),
        settings=dict(rules={"*.mix": "replicate"}),
    ),
    "a norm's weight squared": Refusal(
        lambda: decoder(norm=SquaredRMSNorm(HIDDEN)), ("norm: SquaredRMSNorm", "'norm': 'replicate'")
    ),
    "LayerNorm with a forward of its own": Refusal(
        lambda: decoder(norm=ScaledLayerNorm(HIDDEN)), ("norm: ScaledLayerNorm", "(x - mean) / std")
    ),
    "Linear with a forward of its own": Refusal(
        lambda: decoder(up=LowRank(HIDDEN, 32)), ("up: LowRank has a forward of its own",)
    ),
    "Embedding with a forward of its own": Refusal(
        lambda: Model(embed=RampEmbedding(8, HIDDEN), block=Block()), ("embed: RampEmbedding has a forward",)
    ),
    "weight norm": Refusal(
        lambda: decoder(up=nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, 32))),
        ("up: ParametrizedLinear computes its weight",),
    ),
    "dropout of channels": Refusal(
        lambda: decoder(drop=nn.Dropout1d(0.1)), ("drop: Dropout1d", "use nn.Dropout, or p=0")
    ),
    "max_norm": Refusal(
        lambda: Model(embed=nn.Embedding(8, HIDDEN, max_norm=1.0), block=Block()),
        ("embed: nn.Embedding(max_norm=1.0)", "leave max_norm out"),
    ),
    "max_norm of positions": Refusal(
        lambda: decoder(positions=nn.Embedding(8, HIDDEN, max_norm=1.0)), ("positions: nn.Embedding(max_norm=1.0)",)
    ),
    "narrow embedding": Refusal(lambda: decoder(types=nn.Embedding(8, 4)), ("types: Embedding is 4 wide, not 16",)),
    "padded convolution": Refusal(
        lambda: Model(patch=nn.Conv2d(3, HIDDEN, 2, 2, padding=1), block=Block()),
        ("patch: ", "is not a patch embedding", "padding=0"),
    ),
    "dilated convolution": Refusal(
        lambda: Model(patch=nn.Conv2d(3, HIDDEN, 2, 2, dilation=2), block=Block()), ("dilation=1",)
    ),
    "two layers that share a weight": Refusal(
        tied_wrongly, ("are one parameter", "untie them"), settings=dict(rules={"*.gate": "column"})
    ),
    "attention in one module with an MLP": Refusal(
        lambda: Model(embed=nn.Embedding(8, HIDDEN), blocks=nn.ModuleList([FlatBlock()])),
        ("blocks.0: in mode '1d+sequence'", "blocks.0.q_proj", "module of their own"),
        mode="1d+sequence",
    ),
    "the same in 3d": Refusal(
        lambda: Model(embed=nn.Embedding(8, HIDDEN), block=FlatBlock()), ("block: in mode '3d'",), CUBE, "3d"
    ),
    # attention's own code
    "slopes counted from zero on every rank": Refusal(
        lambda: Model(attn=Alibi()),
        ("attn: attention that cannot be split by heads", "Alibi's own code computes other values"),
    ),
    "an odd order of a fused projection": Refusal(
        lambda: Model(attn=Swapped()),
        ("Swapped's own code computes other values", "another order", "'attn': 'replicate'"),
    ),
    "no heads on a rank": Refusal(
        lambda: Model(attn=Headless()),
        ("attn: attention that cannot be split by heads", "has no heads", "'attn': 'replicate'"),
    ),
    "biases of all heads": Refusal(
        lambda: Model(blocks=nn.ModuleList([Model(attn=Biased())])),
        ("blocks.0.attn: ", "Biased takes position_bias", "could not be tried", "the rule '*.attn': 'replicate'"),
    ),
    "heads of a configuration": Refusal(
        lambda: Model(attn=Configured()), ("attn: ", "Configured's forward reads config.num_attention_heads")
    ),
    "a second stream for a whole module": Refusal(
        lambda: decoder(mix=TakesResidual()),
        ("mix: TakesResidual cannot stay whole in mode '2d'", "residual", "use mode '1d'"),
        SQUARE,
        "2d",
        dict(rules={"mix": "replicate"}),
    ),
    # rules that do not go together
    **{
        f"{leaf} as {role}": Refusal(
            lambda: Model(embed=nn.Embedding(8, HIDDEN), norm=nn.LayerNorm(HIDDEN), mlp=GatedMLP()),
            (f"mlp.{leaf}: Linear(", f"cannot be {role!r} by itself", "go together", "'mlp': 'replicate'"),
            settings=dict(rules={f"*.{leaf}": role}),
        )
        for leaf, role in (("up", "row"), ("up", "replicate"), ("down", "replicate"), ("down", "column"))
    },
    **{
        f"{leaf} as {role}": Refusal(
            lambda: Model(blocks=nn.ModuleList([Block()])),
            (f"blocks.0.attn.{leaf} is {role!r}", "go together", "'*.attn': 'replicate'"),
            settings=dict(rules={f"*.{leaf}": role}),
        )
        for leaf, role in (("q_proj", "replicate"), ("v_proj", "row"), ("out_proj", "column"))
    },
    "the output of attention kept whole": Refusal(
        Block,
        ("attn.out_proj cannot stay whole inside attention", "is 'row'"),
        settings=dict(rules={"*.out_proj": "replicate"}),
    ),
    # attention by tokens
    "no attention by tokens": Refusal(
        mlp, ("no attention with linear layers was found", "'1d+sequence'"), mode="1d+tokens"
    ),
    "torch's own attention by tokens": Refusal(
        lambda: Model(embed=nn.Embedding(8, HIDDEN), attn=nn.MultiheadAttention(HIDDEN, 4), up=nn.Linear(HIDDEN, 64)),
        ("attn", "nn.MultiheadAttention has no linear layers", "'1d'"),
        mode="1d+tokens",
    ),
    "attention by tokens in one module with an MLP": Refusal(
        lambda: Model(embed=nn.Embedding(8, HIDDEN), blocks=nn.ModuleList([FlatBlock()])),
        ("blocks.0: in mode '1d+tokens'", "blocks.0.q_proj", "module of their own"),
        mode="1d+tokens",
    ),
    "heads that tokens cannot be exchanged for": Refusal(
        Block,
        ("attn: 4 attention heads cannot be split over tensor (3 blocks)",),
        Mesh({"tensor": 3}, rank=0),
        "1d+tokens",
    ),
    # what the caller says
    "unknown mode": Refusal(mlp, ("no tensor-parallel mode '2.5'", "Did you mean '2.5d'?", "1d+sequence"), mode="2.5"),
    "mode of another type": Refusal(mlp, ("no tensor-parallel mode 2",), mode=2),
    "missing axes": Refusal(mlp, ("mode '2d' names the axis 'row'", "Its axes are tensor"), mode="2d"),
    "misspelt axis": Refusal(mlp, ("'tensor'", "Did you mean 'tensors'?"), Mesh({"tensors": 4}, rank=0)),
    "unknown role": Refusal(
        mlp, ("rule '0': 'colum' is not a role", "'column'", "replicate"), settings=dict(rules={"0": "colum"})
    ),
    "rules that are no dict": Refusal(
        mlp, ("rules='*.up' is a str, not a dict of role by pattern", "rules={'"), settings=dict(rules="*.up")
    ),
    "rule without a match": Refusal(
        decoder, ("rule 'blok.*' matches no submodule", "block"), settings=dict(rules={"blok.*": "row"})
    ),
    "rule for another kind": Refusal(
        decoder,
        ("rule '*.ln1' gives 'block.ln1' the role 'column'", "a linear layer", "LayerNorm"),
        settings=dict(rules={"*.ln1": "column"}),
    ),
    "unknown lowering": Refusal(mlp, ("no lowering 'rings'", "'ring'"), settings=dict(lowering="rings")),
}


def state_of(model: nn.Module) -> list[Any]:
    """What a change to a model would show in: its modules, parameters, attributes and hooks, each by identity."""
    found: list[Any] = []
    for name, module in model.named_modules():
        attributes = {key: id(value) for key, value in vars(module).items()}
        hooks = [len(hooks) for key, hooks in vars(module).items() if "hooks" in key and hooks is not None]
        found.append((name, id(module), attributes, hooks))
        found += [(key, id(p), p.shape, dict(vars(p))) for key, p in module.named_parameters(recurse=False)]
        found += [(key, value) for key, value in vars(module).items() if isinstance(value, int | float | str)]
    return found


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_what_would_work_and_nothing_changed(name: str) -> None:
    refusal = REFUSALS[name]
    model = refusal.make()
    before = state_of(model)
    with pytest.raises(LayoutError) as raised:
        parallelize(model, refusal.mesh, refusal.mode, **refusal.settings)
    for words in refusal.says:
        assert words in str(raised.value)
    assert state_of(model) == before


def test_every_submodule_that_cannot_be_placed_is_listed() -> None:
    model = decoder(one=nn.Bilinear(4, 4, 4), two=nn.GRU(4, 4), three=nn.BatchNorm1d(4))
    with pytest.raises(LayoutError) as raised:
        parallelize(model, FOUR, "1d")
    text = str(raised.value)
    assert "cannot place 3 submodule(s)" in text
    assert all(f"\n  {name}: " in text for name in ("one", "two", "three"))


class Sinks(nn.Module):
    """A block whose attention has a parameter for each head, as GPT-OSS has, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.self_attn, self.mlp = nn.LayerNorm(HIDDEN), GroupedAttention(4, 4), GatedMLP()
        self.self_attn.sinks = nn.Parameter(torch.zeros(4))


def test_the_rule_for_a_module_with_a_parameter_of_its_own_is_ready_to_paste() -> None:
    model = Model(embed=nn.Embedding(32, HIDDEN), layers=nn.ModuleList(Sinks() for _ in range(2)))
    with pytest.raises(LayoutError) as raised:
        parallelize(model, FOUR, "1d")
    rule = {"layers.*.self_attn": "replicate"}
    assert f"Say what they are with rules={json.dumps(rule)}, which keeps that module of every block whole" in str(
        raised.value
    )
    parallelize(model, FOUR, "1d", rules=rule)
    assert type(model.get_submodule("layers.1.self_attn.q_proj")) is nn.Linear


def test_a_model_is_split_once() -> None:
    model = mlp()
    parallelize(model, FOUR, "1d")
    before = state_of(model)
    for settings in ({}, dict(rules={"0": "column"})):
        with pytest.raises(LayoutError) as raised:
            parallelize(model, FOUR, "1d", **settings)
        assert str(raised.value) == (
            "the Sequential is split already, over Mesh(tensor 4): a model is parallelized once, so build it again to split "
            "it differently"
        )
    assert state_of(model) == before


def test_what_is_no_module_and_what_is_no_mesh() -> None:
    with pytest.raises(LayoutError, match=r"needs an nn\.Module, but got 3, a int"):
        parallelize(3, FOUR, "1d")
    with pytest.raises(LayoutError, match=r"mesh=4 is a int, not a Mesh: .*Mesh\(\{'tensor': 4\}\)"):
        parallelize(mlp(), 4, "1d")


def test_a_refused_module_can_be_split_afterwards_in_another_mode() -> None:
    layer = nn.Linear(8, 16)
    with pytest.raises(LayoutError):
        parallelize(layer, FOUR, "1d", rules={"": "column"})
    model = nn.Sequential(layer, nn.Linear(16, 8))
    parallelize(model, SQUARE, "2d")
    assert model[0].weight.shape == (8, 4)


def test_two_models_may_share_weights_before_they_are_split() -> None:
    one, other = mlp(), mlp()
    other[0].weight = one[0].weight
    parallelize(one, FOUR, "1d")
    parallelize(other, SQUARE, "2d")
    assert one[0].weight.shape == (8, 16)
    assert other[0].weight.shape == (16, 8)


@pytest.mark.parametrize("mode", ["1d", "1d+sequence"])
def test_sizes_that_divide_are_not_refused(mode: str) -> None:
    for make in (Classic, lambda: Flat(gated=True, kv_heads=2), ViT, Attention, Block, GatedMLP, mlp):
        parallelize(make(), FOUR, mode)


def test_layers_made_directly_check_their_sizes_and_axes() -> None:
    with pytest.raises(LayoutError, match=r"out_features=10 of a column layer.*multiple of 4"):
        Linear(8, 10, mesh=FOUR)
    with pytest.raises(LayoutError, match=r"in_features=10 of a row layer.*8 or 12"):
        Linear(10, 8, mesh=FOUR, role="row")
    with pytest.raises(LayoutError, match="mode '2d' names the axis 'row'"):
        Linear(8, 8, mesh=FOUR, mode="2d")
    with pytest.raises(LayoutError, match=r"a part of 6 of a column layer.*4 or 8"):
        Linear(8, 12, mesh=FOUR, parts=(Part(6), Part(6)))
    with pytest.raises(LayoutError, match="embedding_dim=9"):
        Embedding(10, 9, mesh=SQUARE, mode="2d")
    with pytest.raises(LayoutError, match="mode '2d' names the axis"):
        Embedding(10, 8, mesh=FOUR, mode="2d")
    for kind in (LayerNorm, RMSNorm):
        with pytest.raises(LayoutError, match="hidden size 9"):
            kind(9, mesh=SQUARE, mode="2d")
        with pytest.raises(LayoutError, match="mode '2d' names the axis"):
            kind(8, mesh=FOUR, mode="2d")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(labels=torch.zeros(3, dtype=torch.int64)), r"3 labels for 4 local rows"),
        (dict(vocab_size=40), "logits with 3 columns are not a block of 40 words"),
        (dict(vocab_size=3), "logits with 3 columns are not a block of 3 words"),
        (dict(reduction="none"), "reduction='none'"),
        (dict(mode="2d"), "mode '2d' names the axis 'row'"),
    ],
)
def test_cross_entropy_checks_what_it_is_given(change: dict[str, Any], says: str) -> None:
    settings = dict(labels=torch.zeros(4, dtype=torch.int64), mesh=FOUR, mode="1d", vocab_size=10) | change
    with pytest.raises(LayoutError, match=says):
        cross_entropy(torch.zeros(4, 3), **settings)


def test_a_mode_that_does_not_fit_outside_of_blocks() -> None:
    """It splits tokens within sequences, and its weights lie only under a stream that is split so."""
    mode = Mode(
        name="odd",
        axes=("t",),
        residual="m:t h",
        column="k n:t",
        hidden="m n:t",
        row="k:t n",
        embedding="v:t h",
        ids="m:t v",
        head="k v:t",
        logits="m v:t",
    )
    mesh = Mesh({"t": 4}, rank=0)
    with pytest.raises(LayoutError, match=r"mode 'odd' splits tokens within sequences.*flat_tokens = True"):
        parallelize(Classic(), mesh, mode)
    parallelize(Flat(gated=False), mesh, mode)


def test_parts_that_a_mode_gathers_again() -> None:
    mode = Mode(
        name="columns",
        axes=("t",),
        residual="m:t h",
        column="k n:t",
        hidden="m:t n",
        row="k n:t",
        embedding="v:t h",
        ids="m:t v",
        head="k v:t",
        logits="m:t v",
    )
    with pytest.raises(LayoutError, match=r"fused parts \(16, 16, 16\).*let it split k in the mode's column layout"):
        parallelize(Flat(gated=False), Mesh({"t": 4}, rank=0), mode)
    parallelize(Classic(), Mesh({"t": 4}, rank=0), mode)


def test_a_loss_of_the_models_own_over_a_batch_that_was_filled_up() -> None:
    class Summed(Classic):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).square().mean()

    model, ids = Summed(), torch.zeros(3, 8, dtype=torch.int64)
    with fake_world(4):
        parallelize(model, Mesh({"row": 4, "col": 1}), "2d")
        with pytest.raises(LayoutError, match=r"a batch of 3 was padded to 4 rows.*multiple of 4"):
            model(ids)
        model(ids[[0, 1, 2, 0]])


def test_a_mean_over_targets_is_that_of_a_batch_that_was_filled_up() -> None:
    """As the model computed it; what is made of it then may be of all rows."""

    class Mean(Classic):
        def forward(self, ids: Tensor, labels: Tensor, factor: float = 0.0) -> Tensor:
            loss = F.cross_entropy(super().forward(ids).flatten(0, 1), labels.flatten())
            return loss * factor if factor else loss

    model, ids = Mean(), torch.zeros(3, 8, dtype=torch.int64)
    with fake_world(4):
        parallelize(model, Mesh({"row": 4, "col": 1}), "2d")
        assert model(ids, ids).dim() == 0
        with pytest.raises(LayoutError, match=r"a batch of 3 was padded to 4 rows"):
            model(ids, ids, factor=2.0)


def test_a_table_of_positions_reads_nothing_but_the_shape_of_a_column() -> None:
    class Positions(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.arange(x.shape[1]))

    class Values(Positions):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.unsqueeze(-1)

    with fake_world(4):
        for kind in (Positions, Values):
            table = PositionEmbedding(
                kind(8, 16), Mesh({"row": 2, "col": 2}), find_mode("2d"), flat_tokens=False, batch=BatchShape()
            )
            assert bool(table(torch.zeros(2, 3)).isnan().any()) == (kind is Values)


def test_find_mode_names_the_nearest() -> None:
    with pytest.raises(LayoutError, match=r"'1d\+seq'.*Did you mean '1d\+sequence'"):
        find_mode("1d+seq")
