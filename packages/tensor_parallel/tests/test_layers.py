"""Each layer against the serial one: output, input gradient, and the gradient of every parameter."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tensor_parallel_checks import (
    CASES,
    COVERING,
    Case,
    alone,
    assert_gradients_equal,
    case,
    gradients,
    mesh_of,
    seeded,
    share_of_data,
    whole_gradients,
)
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError, Mesh, Part, Placement, dropout_stream, metadata
from meshfold.mesh.testing import run_on_ranks
from meshfold.tensor_parallel import Embedding, LayerNorm, Linear, Mode, RMSNorm, cross_entropy, find_mode
from meshfold.tensor_parallel.convert.functional_dropout import DropoutPart, FunctionalDropout
from meshfold.tensor_parallel.layers import PositionEmbedding
from meshfold.tensor_parallel.layers.attention import attention, attention_weights
from meshfold.tensor_parallel.layers.base import BatchShape
from meshfold.tensor_parallel.layers.dropout import Dropout
from meshfold.tensor_parallel.layers.embedding import PatchEmbedding
from meshfold.tensor_parallel.layers.linear import Role, stem_plan
from meshfold.tensor_parallel.modes import vocabulary_multiple

BATCH, SEQUENCE, HIDDEN, INNER, HEADS, HEAD_DIM, VOCAB = 16, 2, 16, 32, 8, 2, 37
TOKENS = BATCH * SEQUENCE


@dataclass(frozen=True, kw_only=True)
class At:
    """Where a layer is tried.

    Attributes:
        mesh, mode: the mesh, with or without an axis of data parallelism, and the mode.
        dtype: of weights and activations.
        what: for messages.
    """

    mesh: Mesh
    mode: Mode
    dtype: torch.dtype
    what: str

    def draw(self, *shape: int, seed: int = 3) -> Tensor:
        """The same numbers on every rank."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(self.dtype)

    def compare(
        self,
        layer: nn.Module,
        serial: nn.Module,
        x: Tensor,
        x_axes: tuple[tuple[str, ...], ...],
        y_axes: tuple[tuple[str, ...], ...],
        multiple: dict[int, int] | None = None,
    ) -> None:
        """Run both on ``x``, whole, with rows in the first dim, and compare everything."""
        x_serial = x.clone().requires_grad_(x.is_floating_point())
        y_serial = serial(x_serial)
        dy = self.draw(*y_serial.shape, seed=4)
        y_serial.backward(dy)

        x_share, dy_share = share_of_data(x, self.mesh), share_of_data(dy, self.mesh)
        x_at = Placement(shape=tuple(x_share.shape), axes=x_axes)
        y_at = Placement(shape=tuple(dy_share.shape), axes=y_axes, multiple=multiple or {})
        x_local = x_at.shard(x_share, self.mesh).requires_grad_(x.is_floating_point())
        y_local = layer(x_local)
        assert y_local.shape == y_at.local_shape(self.mesh), f"{self.what}: {tuple(y_local.shape)}"
        y_local.backward(y_at.shard(dy_share, self.mesh))

        found = {"y": y_at.gather(y_local.detach(), self.mesh)}
        wanted = {"y": share_of_data(y_serial.detach(), self.mesh)}
        assert_gradients_equal(found, wanted, self.what, self.dtype)
        found, wanted = whole_gradients(layer, self.mesh), gradients(serial)
        if x_local.grad is not None and x_serial.grad is not None:
            found["dx"], wanted["dx"] = (
                x_at.gather(x_local.grad, self.mesh),
                share_of_data(x_serial.grad, self.mesh),
            )
        assert_gradients_equal(found, wanted, self.what, self.dtype)


# -- linear ---------------------------------------------------------------------------------------------------------


def compare_linear(
    at: At, role: Role, serial: nn.Linear, parts: tuple[Part, ...] = (), lowering: str = "gather"
) -> None:
    layer = Linear.convert(serial, at.mesh, at.mode, role, parts=parts, lowering=lowering)
    plan = stem_plan(at.mode) if role == "stem" else at.mode.plans[role]
    assert (layer.bias is None) == (serial.bias is None)
    x_axes = ((), ()) if role == "stem" else (plan.x[plan.m], plan.x[plan.k])
    padded = {1: vocabulary_multiple(at.mode, at.mesh)} if "head" in role else {}
    y_axes = (plan.y[plan.m], plan.y[plan.n])
    if parts:  # columns of the output are this rank's share of each part
        y_axes = (plan.y[plan.m], ())
        layer, serial = _Ordered(layer, at.mesh), serial
    at.compare(layer, serial, at.draw(TOKENS, serial.in_features), x_axes, y_axes, padded)


class _Ordered(nn.Module):
    """A linear layer with fused parts whose output is put together, in the order of the whole layer's columns."""

    def __init__(self, layer: Linear, mesh: Mesh) -> None:
        super().__init__()
        self.layer, self.mesh = layer, mesh

    def forward(self, x: Tensor) -> Tensor:
        meta = metadata(self.layer.weight)
        assert meta is not None
        return _Collect.apply(self.layer(x), meta.placement, self.mesh)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.named_parameters()


class _Collect(torch.autograd.Function):
    """The whole output from local columns; each rank passes back its block, a share of what several ranks hold."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight_at: Placement, mesh: Mesh) -> Tensor:
        width = weight_at.shape[0]
        ctx.at = Placement(shape=(y.shape[0], width), axes=((), weight_at.axes[0]), parts={1: weight_at.parts[0]})
        ctx.mesh = mesh
        return ctx.at.gather(y, mesh)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dy_local = ctx.at.shard(dy, ctx.mesh)
        start = 0
        for part, (_, length) in zip(ctx.at.parts[1], ctx.at.segments(ctx.mesh, 1), strict=True):
            dy_local[:, start : start + length] /= part.repeat
            start += length
        return dy_local, None, None


def fused(at: At, kv_heads: int) -> tuple[Part, ...]:
    """Parts of a fused projection of queries, keys and values."""
    repeat = max(1, at.mode.head_divisor(at.mesh) // kv_heads)
    return Part(HEADS * HEAD_DIM), Part(kv_heads * HEAD_DIM, repeat), Part(kv_heads * HEAD_DIM, repeat)


def try_column(at: At) -> None:
    compare_linear(at, "column", seeded(lambda: nn.Linear(HIDDEN, INNER), at.dtype))


def try_column_without_bias(at: At) -> None:
    compare_linear(at, "column", seeded(lambda: nn.Linear(HIDDEN, INNER, bias=False), at.dtype))


def try_column_by_stream_and_ring(at: At) -> None:
    for lowering in ("stream", "ring"):
        try:
            compare_linear(at, "column", seeded(lambda: nn.Linear(HIDDEN, INNER), at.dtype), lowering=lowering)
        except LayoutError as refused:
            assert "does not apply" in str(refused)  # noqa: PT017  a lowering may not apply to a plan


def try_row(at: At) -> None:
    compare_linear(at, "row", seeded(lambda: nn.Linear(INNER, HIDDEN), at.dtype))


def try_gate_and_up(at: At) -> None:
    compare_linear(at, "column", seeded(lambda: nn.Linear(HIDDEN, 2 * INNER), at.dtype), (Part(INNER), Part(INNER)))


def try_fused_qkv(at: At) -> None:
    for kv_heads in (8, 4, 2, 1):
        parts = fused(at, kv_heads)
        compare_linear(
            at,
            "column",
            seeded(partial(nn.Linear, HIDDEN, sum(part.size for part in parts)), at.dtype),
            parts,
        )


def try_keys_with_fewer_heads_than_ranks(at: At) -> None:
    for kv_heads in (2, 1):
        key = fused(at, kv_heads)[1:2]
        compare_linear(at, "column", seeded(lambda n=key[0].size: nn.Linear(HIDDEN, n), at.dtype), key)


def try_head(at: At) -> None:
    compare_linear(at, "head", seeded(lambda: nn.Linear(HIDDEN, VOCAB), at.dtype))


def try_stem(at: At) -> None:
    compare_linear(at, "stem", seeded(lambda: nn.Linear(7, HIDDEN), at.dtype))


def try_conv1d(at: At) -> None:
    """transformers keeps GPT-2's weights ``k n``."""
    serial = seeded(lambda: _Conv1D(HIDDEN, INNER), at.dtype)
    plan = at.mode.plans["column"]
    layer = Linear.convert(serial, at.mesh, at.mode, "column", stored="kn")
    at.compare(layer, serial, at.draw(TOKENS, HIDDEN), (plan.x["m"], plan.x["k"]), (plan.y["m"], plan.y["n"]))


class _Conv1D(nn.Module):
    def __init__(self, reads: int, writes: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(reads, writes)), nn.Parameter(torch.randn(writes))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


# -- embedding ------------------------------------------------------------------------------------------------------


def ids_of(at: At, bound: int) -> Tensor:
    ids = torch.randint(0, bound, (TOKENS,), generator=torch.Generator().manual_seed(7))
    ids[:4] = torch.tensor([5, bound - 1, 0, 5])
    return ids


def try_embedding(at: At) -> None:
    residual = at.mode.layout("residual")
    for padding_idx in (None, 5, -1):
        serial = seeded(lambda p=padding_idx: nn.Embedding(VOCAB, HIDDEN, padding_idx=p), at.dtype)
        layer = Embedding.convert(serial, at.mesh, at.mode)
        at.compare(layer, serial, ids_of(at, VOCAB), ((),), (residual["m"], residual["h"]))


def try_embedding_of_sequences(at: At) -> None:
    """ids ``b s`` -> ``b s h``, where whole sequences are what is split."""
    residual = at.mode.layout("residual")
    serial = seeded(lambda: nn.Embedding(VOCAB, HIDDEN), at.dtype)
    ids = ids_of(at, VOCAB).view(BATCH, SEQUENCE)
    at.compare(Embedding.convert(serial, at.mesh, at.mode), serial, ids, ((), ()), (residual["m"], (), residual["h"]))


class _Shifted(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids + 2)


def try_positions(at: At) -> None:
    residual = at.mode.layout("residual")
    for kind in (nn.Embedding, _Shifted):
        serial = seeded(lambda k=kind: k(VOCAB, HIDDEN), at.dtype)
        layer = PositionEmbedding(serial, at.mesh, at.mode, flat_tokens=True, batch=BatchShape())
        at.compare(layer, serial, ids_of(at, VOCAB - 2), ((),), (residual["m"], residual["h"]))


def try_tied_embedding_and_head(at: At) -> None:
    """One table, looked up and multiplied with: its gradient has both."""

    class Tied(nn.Module):
        def __init__(self, table: nn.Module, head: nn.Module) -> None:
            super().__init__()
            self.table, self.head = table, head

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.table(ids)))

    def whole() -> Tied:
        made = Tied(nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False))
        made.head.weight = made.table.weight
        return made

    serial = seeded(whole, at.dtype)
    layer = Tied(
        Embedding.convert(serial.table, at.mesh, at.mode),
        Linear.convert(serial.head, at.mesh, at.mode, "tied_head"),
    )
    assert metadata(layer.table.weight).placement == metadata(layer.head.weight).placement
    layer.head.weight = layer.table.weight
    plan = at.mode.plans["tied_head"]
    padded = {1: vocabulary_multiple(at.mode, at.mesh)}
    at.compare(layer, serial, ids_of(at, VOCAB), ((),), (plan.y["m"], plan.y["v"]), padded)


# -- norms ----------------------------------------------------------------------------------------------------------


def try_norms(at: At) -> None:
    residual = at.mode.layout("residual")
    axes = (residual["m"], residual["h"])
    x = at.draw(TOKENS, HIDDEN) * 3 + 2
    for kind, make in (
        (LayerNorm, lambda: nn.LayerNorm(HIDDEN)),
        (LayerNorm, lambda: nn.LayerNorm(HIDDEN, bias=False)),
        (LayerNorm, lambda: nn.LayerNorm(HIDDEN, elementwise_affine=False)),
        (RMSNorm, lambda: nn.RMSNorm(HIDDEN, eps=1e-5)),
        (RMSNorm, lambda: nn.RMSNorm(HIDDEN, eps=1e-5, elementwise_affine=False)),
    ):
        serial = seeded(make, at.dtype)
        at.compare(kind.convert(serial, 1e-5, at.mesh, at.mode), serial, x, axes, axes)


# -- loss -----------------------------------------------------------------------------------------------------------


def serial_loss(logits: Tensor, labels: Tensor, smoothing: float, z: float, reduction: str, ignored: int) -> Tensor:
    loss = F.cross_entropy(logits, labels, ignore_index=ignored, label_smoothing=smoothing, reduction="sum")
    loss = loss + z * (logits.logsumexp(-1).square() * (labels != ignored)).sum()
    return loss if reduction == "sum" else loss / (labels != ignored).sum()


def try_cross_entropy(at: At) -> None:
    layout = at.mode.layout("logits")
    axes, multiple = (layout["m"], layout["v"]), {1: vocabulary_multiple(at.mode, at.mesh)}
    for smoothing, z, reduction, ignored in (
        (0.0, 0.0, "mean", -100),
        (0.1, 0.0, "sum", -100),
        (0.0, 1e-2, "mean", 3),
        (0.2, 1e-2, "mean", -100),
    ):
        what = f"{at.what} {smoothing=} {z=} {reduction} {ignored=}"
        logits = share_of_data(at.draw(TOKENS, VOCAB) * 4, at.mesh)
        labels = share_of_data(ids_of(at, VOCAB), at.mesh).clone()
        labels[1::3] = ignored
        whole = logits.clone().requires_grad_()
        wanted = serial_loss(whole, labels, smoothing, z, reduction, ignored)
        wanted.backward()
        place = Placement(shape=tuple(logits.shape), axes=axes, multiple=multiple)
        local = place.shard(logits, at.mesh)
        local[:, place.coordinates(at.mesh, 1) >= VOCAB] = 50.0  # what lies in the padding must not matter
        local.requires_grad_()
        loss = cross_entropy(
            local,
            labels,
            mesh=at.mesh,
            mode=at.mode,
            vocab_size=VOCAB,
            ignore_index=ignored,
            label_smoothing=smoothing,
            z_loss=z,
            reduction=reduction,
        )
        loss.backward()
        assert_gradients_equal({"loss": loss}, {"loss": wanted}, what, at.dtype)
        assert_gradients_equal({"dx": place.gather(local.grad, at.mesh)}, {"dx": whole.grad}, what, at.dtype)
        padding = local.grad[:, place.coordinates(at.mesh, 1) >= VOCAB]
        assert not padding.any(), f"{what}: padding has a gradient"


# -- dropout and attention ------------------------------------------------------------------------------------------


def dropped(layer: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """(output, input gradient) of two calls one after the other under one stream."""
    x = x.detach().requires_grad_()
    with dropout_stream(seed=11, step=3):
        y = layer(layer(x))
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def try_dropout(at: At) -> None:
    """The same elements as on one rank: of the residual stream, and of a hidden whose local width may be the same."""
    if at.mesh.size("data") > 1:
        return  # the shares of data parallelism drop elements of their own
    residual, between = at.mode.layout("residual"), at.mode.layout("hidden")
    for width, axes, inner in (
        (HIDDEN, (residual["m"], residual["h"]), 0),
        (INNER, (between["m"], between["n"]), INNER),
        (HIDDEN * 4, (between["m"], between["n"]), HIDDEN * 4),
        (HIDDEN, (between["m"], between["n"]), HIDDEN),
    ):
        x = at.draw(TOKENS, width)
        whole = Dropout(0.4, alone(), find_mode("1d"), HIDDEN, "d", inner=inner)
        local = Dropout(0.4, at.mesh, at.mode, HIDDEN, "d", inner=inner)
        wanted, place = dropped(whole, x), Placement(shape=(TOKENS, width), axes=axes)
        found = dropped(local, place.shard(x, at.mesh))
        for name, a, b in zip(("y", "dx"), found, wanted, strict=True):
            assert torch.equal(place.gather(a, at.mesh), b), f"{at.what} dropout of {width} {axes}: {name}"
        assert 0.4 < (wanted[0] == 0).double().mean() < 0.9
        assert torch.equal(local.eval()(x), x)


def try_dropout_of_attention_weights(at: At) -> None:
    between = at.mode.layout("hidden")
    if at.mesh.size("data") > 1:
        return
    x = at.draw(BATCH, HEADS, SEQUENCE, SEQUENCE)
    place = Placement(shape=tuple(x.shape), axes=(between["m"], between["n"], (), ()))
    whole = Dropout(0.4, alone(), find_mode("1d"), HIDDEN, "d", heads=HEADS)
    local = Dropout(0.4, at.mesh, at.mode, HIDDEN, "d", heads=HEADS)
    wanted, found = dropped(whole, x), dropped(local, place.shard(x, at.mesh))
    assert torch.equal(place.gather(found[0], at.mesh), wanted[0]), at.what


def try_attention(at: At) -> None:
    """Heads and sequences of this rank: equal to torch without dropout, and to one rank with it."""
    between, s, d, mesh = at.mode.layout("hidden"), 4, 4, at.mesh
    if mesh.size("data") > 1:
        return
    axes = (between["m"], between["n"], (), ())
    for kv_heads in (HEADS, HEADS // 2):
        shapes = ((BATCH, HEADS, s, d), (BATCH, kv_heads, s, d), (BATCH, kv_heads, s, d))
        whole = [at.draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        places = [Placement(shape=shape, axes=axes) for shape in shapes]
        for p, causal, mask in ((0.0, True, None), (0.3, True, None), (0.3, False, True), (0.3, False, 0.5)):
            masks = {
                None: None,
                True: torch.ones(s, s, dtype=torch.bool).tril(1),
                0.5: torch.full((s, s), 0.5, dtype=at.dtype).triu(1),
            }
            settings = dict(mask=masks[mask], causal=causal, p=p)
            local = [place.shard(t.detach(), mesh).requires_grad_() for place, t in zip(places, whole, strict=True)]
            dy = at.draw(*shapes[0], seed=9)
            with dropout_stream(1, 2):
                wanted = attention(*whole, **settings, dropout=Dropout(p, alone(), find_mode("1d"), HIDDEN, "a"))
            with dropout_stream(1, 2):
                found = attention(*local, **settings, dropout=Dropout(p, mesh, at.mode, HIDDEN, "a"))
            wanted_grads = torch.autograd.grad(wanted, whole, dy)
            found_grads = torch.autograd.grad(found, local, places[0].shard(dy, mesh))
            names = ("q", "k", "v")
            assert_gradients_equal(
                {"y": places[0].gather(found.detach(), mesh)}
                | {n: at_.gather(g, mesh) for n, at_, g in zip(names, places, found_grads, strict=True)},
                {"y": wanted.detach()} | dict(zip(names, wanted_grads, strict=True)),
                f"{at.what} {kv_heads=} {settings}",
                at.dtype,
            )
            k, v = (t.repeat_interleave(HEADS // kv_heads, 1) for t in whole[1:])
            plain = F.scaled_dot_product_attention(whole[0], k, v, attn_mask=masks[mask], is_causal=causal)
            assert torch.allclose(plain, wanted, rtol=1e-6, atol=1e-6) == (p == 0.0), f"{at.what} {settings}"


# -- patches --------------------------------------------------------------------------------------------------------


def try_patch_embedding(at: At) -> None:
    residual = at.mode.layout("residual")
    images = at.draw(BATCH, 3, 5, 9)  # the last row and column fill no patch
    for bias, padding in ((True, 0), (False, "valid")):
        serial = seeded(
            lambda b=bias, p=padding: nn.Conv2d(3, HIDDEN, (2, 4), stride=(2, 4), bias=b, padding=p), at.dtype
        )
        layer = PatchEmbedding.convert(serial, at.mesh, at.mode)
        at.compare(layer, serial, images, ((), (), (), ()), (residual["m"], residual["h"], (), ()))


TRIALS: dict[str, Callable[[At], None]] = {
    name.removeprefix("try_"): value for name, value in list(globals().items()) if name.startswith("try_")
}


def run_trials(cases: tuple[Case, ...], trials: tuple[str, ...], dtype: torch.dtype) -> int:
    done = 0
    for mode, axes in cases:
        for name in trials:
            TRIALS[name](
                At(
                    mesh=mesh_of(axes),
                    mode=find_mode(mode),
                    dtype=dtype,
                    what=f"{name} in {mode} on {dict(axes)}",
                )
            )
            done += 1
    return done


SOME = (case("2.5d", depth=2, row=2, col=2), case("3d", a=1, b=2, c=4), case("2d", data=2, row=2, col=2))


@pytest.mark.few(4)
@pytest.mark.parametrize("trial", TRIALS)
def test_layer_is_the_serial_one(trial: str) -> None:
    assert run_on_ranks(4, run_trials, CASES[4], (trial,), torch.float64) == [len(CASES[4])] * 4


def test_layers_are_the_serial_ones_on_two_ranks() -> None:
    run_on_ranks(2, run_trials, CASES[2], tuple(TRIALS), torch.float64)


@pytest.mark.slow
def test_layers_are_the_serial_ones_on_eight_ranks() -> None:
    trials = ("column", "row", "fused_qkv", "tied_embedding_and_head", "norms", "cross_entropy")
    run_on_ranks(8, run_trials, SOME, trials, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("trial", TRIALS)
def test_every_layer_is_the_serial_one_on_eight_ranks(trial: str) -> None:
    run_on_ranks(8, run_trials, CASES[8], (trial,), torch.float64)


def test_layers_are_the_serial_ones_in_float32() -> None:
    trials = ("column", "row", "head", "embedding", "norms", "cross_entropy")
    run_on_ranks(4, run_trials, COVERING, trials, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_every_layer_is_the_serial_one_in_float32(world: int) -> None:
    run_on_ranks(world, run_trials, CASES[world], tuple(TRIALS), torch.float32)


@pytest.mark.parametrize("added", [False, True], ids=["bool", "added"])
def test_a_query_that_sees_nothing_has_no_gradient(added: bool) -> None:
    """Padding on the left: as in torch, whose attention without dropout is the standard."""
    seen = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    mask = (seen[:, None, :] & torch.ones(4, 4).tril().bool())[:, None]
    if added:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    found, wanted = (
        [
            torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).requires_grad_()
            for i in range(3)
        ]
        for _ in range(2)
    )
    weights = attention_weights(*found[:2], mask=mask)
    (weights @ found[2]).square().sum().backward()
    F.scaled_dot_product_attention(*wanted, attn_mask=mask).square().sum().backward()
    assert not weights[0, :, :2].any()
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_a_call_that_is_refused_before_its_dropout_begins_says_that_alone() -> None:
    layer = nn.Dropout()
    DropoutPart(FunctionalDropout(), Dropout(0.5, alone(), find_mode("1d"), HIDDEN, "a")).attach(layer)

    def refuse(module: nn.Module, args: Any) -> None:
        raise ValueError("refused")

    layer.register_forward_pre_hook(refuse, prepend=True)
    with warnings.catch_warnings(record=True) as said, pytest.raises(ValueError, match="refused"):
        layer(torch.ones(2, 3))
    assert not said


def check_in_place_behind_on_rank() -> None:
    """Relu of a layer's output in place: the gradients of relu beside it."""
    for axes, mode, role in (
        (dict(tensor=4), "1d", "row"),
        (dict(row=2, col=2), "2d", "column"),
        (dict(a=2, b=2, c=1), "3d", "column"),
        (dict(a=1, b=2, c=2), "3d", "row"),
    ):
        mesh = Mesh(axes)
        layer = Linear(HIDDEN, HIDDEN, bias=False, mesh=mesh, mode=mode, role=role)  # type: ignore[arg-type]
        plan = layer.plan
        tokens, width = (mesh.size(*plan.x[dim]) for dim in (plan.m, plan.k))
        x = torch.randn(BATCH // tokens, SEQUENCE, HIDDEN // width)
        found = []
        for relu in (torch.relu, torch.relu_):
            layer.zero_grad()
            relu(layer(x)).square().sum().backward()
            assert layer.weight.grad is not None
            found.append(layer.weight.grad.clone())
        assert found[0].abs().sum() > 0
        assert torch.equal(*found)
        mesh.close()


def test_code_behind_a_layer_may_work_in_place() -> None:
    run_on_ranks(4, check_in_place_behind_on_rank)
