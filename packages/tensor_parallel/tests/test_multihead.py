"""``nn.MultiheadAttention`` and the layers that torch builds of it: loss and every gradient are the serial model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor_parallel_checks import (
    COVERING,
    Case,
    alone,
    assert_gradients_equal,
    case,
    gradients,
    mesh_of,
    seeded,
    whole_gradients,
)
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError, Mesh, dropout_stream, metadata
from meshfold.mesh.testing import run_on_ranks
from meshfold.tensor_parallel import parallelize
from meshfold.tensor_parallel.layers.attention import SplitMultiheadAttention

VOCAB, HIDDEN, HEADS, ROWS, LENGTH = 24, 16, 4, 4, 6
MODES = (*COVERING, case("2.5d", depth=1, row=2, col=2))
Change = Callable[[nn.MultiheadAttention], None]


class Translator(nn.Module):
    """An encoder and a decoder of torch's, with every mask that they take."""

    def __init__(self, dropout: float = 0.0, bias: bool = True, norm_first: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.transformer = nn.Transformer(
            HIDDEN, HEADS, 2, 2, 32, dropout, batch_first=True, bias=bias, norm_first=norm_first
        )
        self.head = nn.Linear(HIDDEN, VOCAB)
        if tied:
            first, second = (layer.self_attn for layer in self.transformer.encoder.layers)
            second.in_proj_weight = first.in_proj_weight

    def forward(self, source: Tensor, target: Tensor, padding: Tensor, masks: str) -> Tensor:
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        given: dict[str, Any] = dict(tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        if masks == "of heads":  # and added rather than bool
            one = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(causal, float("-inf"))
            scale = torch.arange(ROWS * HEADS, dtype=torch.float64)[:, None, None] / 10
            given = dict(tgt_mask=one + scale * torch.eye(LENGTH, dtype=torch.float64))
        if masks == "causal":
            given = dict(tgt_mask=causal, tgt_is_causal=True)
        found: Tensor = self.transformer(self.embed(source), self.embed(target), **given)
        return self.head(found)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    source, target = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=generator)
    return source, target, torch.arange(LENGTH) >= torch.tensor([LENGTH, 3, 4, 2])[:, None]


def loss_of(model: nn.Module, masks: str = "") -> Tensor:
    source, target, padding = batch()
    return F.cross_entropy(model(source, target, padding, masks).flatten(0, 1), target.flatten())


def compare(mode: str, axes: Any, masks: str, **settings: Any) -> None:
    serial = seeded(lambda: Translator(**settings))
    model, mesh = copy.deepcopy(serial), mesh_of(axes)
    report = parallelize(model, mesh, mode)
    said = {placed.was: placed.weights for placed in report.placed if placed.role == "attention"}
    assert list(said) == ["MultiheadAttention"] and said["MultiheadAttention"].startswith("heads split over")
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in serial.named_parameters()]
    assert model.state_dict().keys() == serial.state_dict().keys()
    for one in (serial, model):
        loss_of(one, masks).backward()
    assert_gradients_equal(whole_gradients(model, mesh), gradients(serial), (mode, axes, masks))
    with torch.no_grad():  # evaluation: torch has a faster way through it
        found, wanted = (loss_of(one.eval(), masks) for one in (model, serial))
    assert float(found) == pytest.approx(float(wanted), rel=1e-10), (mode, axes, masks)


def translators(cases: tuple[Case, ...], masks: str, settings: dict[str, Any]) -> None:
    for mode, axes in cases:
        compare(mode, axes, masks, **settings)


MASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "padding": ("", {}),
    "a mask for each head": ("of heads", dict(tied=True)),
    "causal": ("causal", dict(bias=False, norm_first=True)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("name", MASKS)
def test_torchs_transformer_is_the_serial_one(name: str, turn: int) -> None:
    """A third of the modes for each kind of mask, each mode once; the slow thirds have the rest."""
    masks, settings = MASKS[name]
    run_on_ranks(4, translators, MODES[(list(MASKS).index(name) + turn) % 3 :: 3], masks, settings)


def drop_alike(cases: tuple[Case, ...], rules: dict[str, str]) -> None:
    whole = seeded(lambda: Translator(dropout=0.3))
    reference = copy.deepcopy(whole)
    parallelize(reference, alone(), "1d")
    torch.manual_seed(mesh_of(cases[0][1]).rank)  # torch's own random numbers are others on every rank
    for mode, axes in cases:
        model, mesh = copy.deepcopy(whole), mesh_of(axes)
        parallelize(model, mesh, mode, rules=rules)
        found: list[Tensor] = []
        wanted: list[Tensor] = []
        for one, losses in ((model, found), (reference, wanted)):
            one.zero_grad()
            with dropout_stream(seed=5, step=2):
                loss = loss_of(one)
            loss.backward()
            losses.append(loss.detach())
        assert_gradients_equal({"loss": found[0]}, {"loss": wanted[0]}, mode)
        assert_gradients_equal(whole_gradients(model, mesh), whole_gradients(reference, alone()), mode)
        with torch.no_grad():
            assert not torch.allclose(loss_of(model.eval()), found[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("rules", [{}, {"*attn": "replicate"}], ids=["split", "whole"])
def test_it_drops_the_same_elements_under_every_spec(rules: dict[str, str]) -> None:
    run_on_ranks(4, drop_alike, (MODES[0], MODES[2]), rules)


def test_torchs_own_dropout_is_refused() -> None:
    model = nn.ModuleDict(
        dict(embed=nn.Embedding(VOCAB, HIDDEN), odd=nn.MultiheadAttention(HIDDEN, HEADS, dropout=0.1, kdim=8))
    )
    for rules in ({}, {"odd": "replicate"}):
        with pytest.raises(LayoutError, match=r"odd: .*dropout=0.1 would drop different weights.*set its dropout to 0"):
            parallelize(model, Mesh({"tensor": 2}, rank=0), "1d", rules=rules)


class Weighed(nn.Module):
    """Uses the weights of attention too, of a sequence first or alone."""

    def __init__(self, average: bool, batched: bool) -> None:
        super().__init__()
        self.average, self.batched = average, batched
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.attend = nn.MultiheadAttention(HIDDEN, HEADS)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, keys: Tensor) -> Tensor:
        x, memory = (self.embed(rows.T if self.batched else rows[0]) for rows in (ids, keys))
        out, weights = self.attend(x, memory, memory, average_attn_weights=self.average)
        return self.head(self.norm(x + out)).square().mean() + weights.square().sum()


def weigh() -> None:
    source, target, _ = batch()
    for average in (True, False):
        for batched in (True, False):
            serial = seeded(lambda: Weighed(average, batched))  # noqa: B023  # called here
            model, mesh = copy.deepcopy(serial), mesh_of((("tensor", 4),))
            parallelize(model, mesh, "1d")
            found, wanted = model(source, target), serial(source, target)
            for loss in (found, wanted):
                loss.backward()
            assert_gradients_equal({"loss": found}, {"loss": wanted})
            assert_gradients_equal(whole_gradients(model, mesh), gradients(serial), (average, batched))


def test_weights_come_out_as_of_all_heads() -> None:
    run_on_ranks(4, weigh)


def whole_ones(cases: tuple[Case, ...], settings: dict[str, Any], change: Change | None) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, HIDDEN)
            self.attend = nn.MultiheadAttention(HIDDEN, batch_first=True, **{"num_heads": HEADS, **settings})
            if change is not None:
                change(self.attend)
            self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)
            self.head = nn.Linear(HIDDEN, VOCAB)

        def forward(self, source: Tensor, target: Tensor, padding: Tensor, masks: str) -> Tensor:
            x, memory = self.embed(source), self.embed(target)
            x = x + self.attend(x, memory, value=memory, key_padding_mask=padding)[0]
            return self.head(x + self.down(F.gelu(self.up(x))))

    serial = seeded(Odd)
    loss_of(serial).backward()
    for mode, axes in cases:
        model, mesh = seeded(Odd), mesh_of(axes)
        report = parallelize(model, mesh, mode)
        assert next(placed.weights for placed in report.placed if placed.name == "attend").startswith("whole on every")
        loss_of(model).backward()
        assert_gradients_equal(whole_gradients(model, mesh), gradients(serial), (mode, settings))


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [dict(num_heads=2), dict(add_bias_kv=True, add_zero_attn=True)], ids=str)
def test_one_that_cannot_be_split_stays_whole(settings: dict[str, Any]) -> None:
    run_on_ranks(4, whole_ones, (MODES[0], MODES[2], MODES[4]), settings, None)


def norm_output(attend: nn.MultiheadAttention) -> None:
    nn.utils.parametrizations.weight_norm(attend.out_proj)


def prune_output(attend: nn.MultiheadAttention) -> None:
    attend.out_proj.weight_mask = torch.ones(1)  # type: ignore[assignment]
    del attend.out_proj._parameters["weight"]
    attend.out_proj.weight = torch.eye(HIDDEN, dtype=torch.float64)  # type: ignore[assignment]


@pytest.mark.parametrize("change", [norm_output, prune_output])
def test_one_whose_weights_are_computed_from_others_stays_whole(change: Change) -> None:
    run_on_ranks(4, whole_ones, (MODES[0], MODES[2]), {}, change)


def test_blocks_keep_their_place_in_a_copy() -> None:
    model = Translator()
    parallelize(model, Mesh({"tensor": 4}, rank=1), "1d")
    copied = copy.deepcopy(model)
    for (name, mine), other in zip(model.named_parameters(), copied.parameters(), strict=True):
        assert metadata(mine) is not None
        if "attn.in_proj" in name or "attn.out_proj.weight" in name:
            assert metadata(other) == metadata(mine), name
    attend = copied.transformer.encoder.layers[0].self_attn
    assert isinstance(attend, SplitMultiheadAttention) and isinstance(attend, nn.MultiheadAttention)
    assert attend.in_proj_weight.shape == (3 * HIDDEN // 4, HIDDEN)
    assert attend.out_proj.weight.shape == (HIDDEN, HIDDEN // 4)


def test_a_hint_without_the_mask_is_refused() -> None:
    model = nn.ModuleDict(dict(embed=nn.Embedding(VOCAB, HIDDEN), attend=nn.MultiheadAttention(HIDDEN, HEADS)))
    parallelize(model, Mesh({"tensor": 1}, rank=0), "1d")
    x = torch.randn(LENGTH, ROWS, HIDDEN)
    with pytest.raises(LayoutError, match="give attn_mask"):
        model["attend"](x, x, x, is_causal=True)


def test_a_mask_of_other_tokens_is_refused() -> None:
    model = nn.ModuleDict(dict(embed=nn.Embedding(VOCAB, HIDDEN), attend=nn.MultiheadAttention(HIDDEN, HEADS)))
    parallelize(model, Mesh({"tensor": 1}, rank=0), "1d")
    x, mask = torch.randn(LENGTH, ROWS, HIDDEN), torch.zeros(LENGTH - 1, LENGTH - 1)
    with pytest.raises(LayoutError, match=f"a mask of {LENGTH - 1} × {LENGTH - 1} tokens.*{LENGTH} queries"):
        model["attend"](x, x, x, attn_mask=mask)
