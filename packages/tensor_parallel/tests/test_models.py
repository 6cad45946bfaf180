"""Whole models against the serial model: loss, logits and every gradient, in every mode."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor_parallel_checks import (
    CASES,
    COVERING,
    WITHOUT_DATA,
    Axes,
    Case,
    alone,
    assert_gradients_equal,
    case,
    gradients,
    mesh_of,
    seeded,
    share_of_data,
    two_of_them,
    whole_gradients,
)
from tensor_parallel_models import (
    HIDDEN,
    LANGUAGE_MODELS,
    PARTS,
    UNUSUAL,
    VOCAB,
    Classic,
    Encoder,
    Flat,
    ViT,
    WithRouter,
)
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import Mesh, all_gather, checkpoint_contexts, dropout_stream, metadata
from meshfold.mesh.testing import run_on_ranks
from meshfold.tensor_parallel import Mode, parallelize

SEQUENCE = 6
EIGHT = (case("2.5d", depth=2, row=2, col=2), case("3d", a=2, b=2, c=2))


def tokens(rows: int, vocab: int, ignored: bool = True) -> tuple[Tensor, Tensor]:
    """ids and labels ``b s``; some labels do not count."""
    ids = torch.randint(0, vocab, (rows, SEQUENCE), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    if ignored:
        labels[0, 2] = labels[-1, 4:] = -100
    return ids, labels


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    """The loss that the model computes, or that one computes of its logits."""
    if isinstance(model, Classic):
        logits = model(ids)
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
    return model(input_ids=ids, labels=labels, **settings).loss


def logits_of(model: nn.Module, ids: Tensor, **settings: Any) -> Tensor:
    with torch.no_grad():
        return model(ids) if isinstance(model, Classic) else model(input_ids=ids, **settings).logits


def compare_language_model(
    make: Callable[[], nn.Module],
    cases: tuple[tuple[str | Mode, Axes], ...],
    rows: int,
    vocab: int,
    **settings: Any,
) -> None:
    """Loss, gradients and logits of a model under each mode."""
    serial = seeded(make)

    @functools.cache
    def batch_and_serial(shares: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor], Tensor]:
        """ids and labels of as many shares; the serial model's loss, gradients and logits."""
        # With data parallelism the mean over the batch is the mean of the shares only if they count equally.
        ids, labels = tokens(rows * shares, vocab, ignored=shares == 1)
        reference = copy.deepcopy(serial)
        loss = loss_of(reference, ids, labels, **settings)
        loss.backward()
        return ids, labels, loss, gradients(reference), logits_of(reference, ids, **settings)

    for mode, axes in cases:
        mesh, what = mesh_of(axes), f"{mode if isinstance(mode, str) else mode.name} on {dict(axes)}"
        shares = mesh.size("data")
        ids, labels, wanted, exact, logits = batch_and_serial(shares)
        model = copy.deepcopy(serial)
        report = parallelize(model, mesh, mode)
        assert report.parameters == sum(p.numel() for p in serial.parameters())
        loss = loss_of(model, share_of_data(ids, mesh), share_of_data(labels, mesh), **settings)
        (loss / shares).backward()
        if shares == 1:
            assert_gradients_equal({"loss": loss}, {"loss": wanted}, what)
        assert_gradients_equal(whole_gradients(model, mesh), exact, what)
        assert_gradients_equal(
            {"logits": logits_of(model, share_of_data(ids, mesh), **settings)},
            {"logits": share_of_data(logits, mesh)},
            what,
        )


def language_models(names: tuple[str, ...], cases: tuple[Case, ...], rows: int) -> None:
    for name in names:
        compare_language_model(LANGUAGE_MODELS[name], cases, rows, VOCAB)


@pytest.mark.few(1)
@pytest.mark.parametrize(("place", "name"), list(enumerate(LANGUAGE_MODELS)))
def test_language_model_is_the_serial_one(place: int, name: str) -> None:
    """The GPT in all modes, the others in two each."""
    run_on_ranks(4, language_models, (name,), CASES[4] if name == "gpt" else two_of_them(place), 4)


def test_language_models_are_the_serial_ones_on_two_and_eight_ranks() -> None:
    run_on_ranks(2, language_models, ("gpt",), CASES[2][::2], 4)
    run_on_ranks(8, language_models, ("gpt",), EIGHT[1:], 4)


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_all_language_models_are_the_serial_ones_in_all_modes(world: int) -> None:
    run_on_ranks(world, language_models, tuple(LANGUAGE_MODELS), CASES[world], 4)


def test_a_batch_that_cannot_be_split_is_filled_up() -> None:
    """One model in 2d, the other one in 3d."""
    for name, mode in zip(("gpt", "classic"), COVERING[2:], strict=True):
        run_on_ranks(4, language_models, (name,), (mode,), 3)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_any_batch_is_filled_up_in_all_modes(rows: int) -> None:
    run_on_ranks(4, language_models, tuple(LANGUAGE_MODELS), WITHOUT_DATA[4], rows)


# -- parts of models ------------------------------------------------------------------------------------------------


def compare_parts(cases: tuple[Case, ...], rows: int, unusual: bool = False) -> None:
    """Modules without an embedding: whole inputs and outputs, the input's gradient too."""
    for name, make in (UNUSUAL if unusual else PARTS).items():
        serial = seeded(make)
        for mode, axes in cases:
            mesh = mesh_of(axes)
            model, x = (
                copy.deepcopy(serial),
                torch.randn(rows, 8, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
            )
            parallelize(model, mesh, mode)
            compare_outputs(model, copy.deepcopy(serial), x, mesh, f"{name} in {mode} on {dict(axes)}")


def compare_outputs(model: nn.Module, serial: nn.Module, x: Tensor, mesh: Mesh, what: str) -> None:
    """Run both on one input, whole on every rank, and compare outputs and gradients."""
    mine, theirs = x.clone(), x.clone()
    if x.is_floating_point():
        mine.requires_grad_(), theirs.requires_grad_()
    y, wanted = model(mine), serial(theirs)
    dy = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    y.backward(dy), wanted.backward(dy)
    assert_gradients_equal({"y": y}, {"y": wanted}, what)
    found, exact = whole_gradients(model, mesh, data="none"), gradients(serial)
    if mine.grad is not None and theirs.grad is not None:
        found["dx"], exact["dx"] = mine.grad, theirs.grad
    assert_gradients_equal(found, exact, what)


def test_parts_of_models_take_and_return_whole_tensors() -> None:
    run_on_ranks(4, compare_parts, two_of_them(2), 3)
    run_on_ranks(4, compare_parts, (CASES[4][2],), 4, unusual=True)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 3, 1])
@pytest.mark.parametrize("world", CASES)
def test_parts_of_models_in_all_modes(world: int, rows: int) -> None:
    # Most parts have no attention to compute by tokens.
    run_on_ranks(world, compare_parts, tuple(case for case in CASES[world] if case[0] != "1d+tokens"), rows)
    if world == 4 == rows:
        run_on_ranks(4, compare_parts, (CASES[4][0], CASES[4][2]), 4, unusual=True)


def compare_vision_and_encoder(cases: tuple[Case, ...], inputs: tuple[int, ...] = (0, 1, 2)) -> None:
    for mode, axes in cases:
        tried = (
            (ViT, torch.randn(4, 3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))),
            (ViT, torch.randn(3, 3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))),
            (Encoder, tokens(3, VOCAB)[0]),
        )
        for make, x in (tried[number] for number in inputs):
            serial = seeded(make)
            model = copy.deepcopy(serial)
            parallelize(model, mesh_of(axes), mode)
            if make is ViT:
                x = x.clone()
                y, wanted = model(x), serial(x)
                dy = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
                y.backward(dy), wanted.backward(dy)
                assert_gradients_equal({"y": y}, {"y": wanted}, f"{mode} {axes}")
                assert_gradients_equal(
                    whole_gradients(model, mesh_of(axes), data="none"), gradients(serial), f"{mode} {axes}"
                )
            else:
                compare_outputs(model, serial, x, mesh_of(axes), f"{make.__name__} in {mode} on {axes}")


def test_a_vision_transformer_and_a_model_without_a_head() -> None:
    for number in range(3):
        run_on_ranks(4, compare_vision_and_encoder, COVERING[number + 1 : number + 2], (number,))


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_a_vision_transformer_and_a_model_without_a_head_in_all_modes(world: int) -> None:
    run_on_ranks(world, compare_vision_and_encoder, CASES[world])


# -- dropout --------------------------------------------------------------------------------------------------------


def compare_dropout(
    make: Callable[[], nn.Module],
    cases: tuple[Case, ...],
    rows: int,
    vocab: int,
    rules: dict[str, str] | None = None,
    **settings: Any,
) -> None:
    """With dropout a model under any mode is the model on one rank, in training and recomputed."""
    serial = seeded(make).train()
    ids, labels = tokens(rows, vocab)
    reference = copy.deepcopy(serial)
    parallelize(reference, alone(), "1d", rules=rules)
    with dropout_stream(seed=5, step=1):
        wanted = loss_of(reference, ids, labels, **settings)
        wanted.backward()
    plain = loss_of(copy.deepcopy(serial).eval(), ids, labels, **settings)
    assert abs(float(wanted) - float(plain)) > 1e-4, "nothing was dropped"
    for mode, axes in cases:
        mesh, what = mesh_of(axes), f"{mode} on {dict(axes)}"
        model = copy.deepcopy(serial)
        parallelize(model, mesh, mode, rules=rules)
        with dropout_stream(seed=5, step=1):
            loss = loss_of(model, ids, labels, **settings)
            loss.backward()
        assert_gradients_equal({"loss": loss}, {"loss": wanted}, what)
        assert_gradients_equal(whole_gradients(model, mesh), gradients(reference), what)


def own_dropout(flat: tuple[Case, ...], classic: tuple[Case, ...], router: tuple[Case, ...]) -> None:
    compare_dropout(lambda: Flat(gated=False, dropout=0.2), flat, 4, VOCAB)
    compare_dropout(lambda: Classic(dropout=0.2), classic, 3, VOCAB)
    compare_dropout(WithRouter, router, 4, VOCAB, rules={"blocks.1": "replicate"})


def test_dropout_is_that_of_one_rank() -> None:
    run_on_ranks(4, own_dropout, COVERING[3:], COVERING[1:2], COVERING[2:3])


@pytest.mark.slow
@pytest.mark.parametrize("world", WITHOUT_DATA)
def test_dropout_is_that_of_one_rank_in_all_modes(world: int) -> None:
    run_on_ranks(world, own_dropout, *[WITHOUT_DATA[world]] * 3)


# -- training -------------------------------------------------------------------------------------------------------


def train_and_compare_replicas(
    make: Callable[[], nn.Module], cases: tuple[Case, ...], vocab: int, **settings: Any
) -> None:
    for mode, axes in cases:
        mesh, model = mesh_of(axes), seeded(make, torch.float32)
        parallelize(model, mesh, mode)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            ids, labels = tokens(4, vocab)
            with dropout_stream(seed=0, step=step):
                loss = loss_of(model, ids, labels, **settings)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        assert losses[0] > losses[1] > losses[2], losses
        assert_replicas_equal(model, mesh, f"{mode} on {dict(axes)}")


def assert_replicas_equal(model: nn.Module, mesh: Mesh, what: str) -> None:
    """Every rank that holds the same block holds the same bits."""
    compared = 0
    for name, parameter in model.named_parameters():
        place = metadata(parameter).placement
        everyone = all_gather(parameter.detach().unsqueeze(0), mesh.group(*mesh.names), 0)
        mine = place.rectangles(mesh)
        for rank, other in enumerate(everyone):
            if rank != mesh.rank and place.rectangles(mesh, rank) == mine:
                compared += 1
                assert torch.equal(other, parameter), f"{what}: {name} of rank {mesh.rank} is not that of rank {rank}"
    assert compared or all(mesh.size(*metadata(p).placement.split_axes) == mesh.world_size for p in model.parameters())


def train_own(flat: tuple[Case, ...], classic: tuple[Case, ...]) -> None:
    train_and_compare_replicas(lambda: Flat(gated=True, kv_heads=1, dropout=0.1), flat, VOCAB)
    train_and_compare_replicas(lambda: Classic(dropout=0.1), classic, VOCAB)


@pytest.mark.slow
def test_replicas_stay_equal_to_the_bit() -> None:
    """Each mode with one of the two models."""
    run_on_ranks(4, train_own, (*two_of_them(0), case("2.5d", depth=2, row=2, col=1)), two_of_them(1))


@pytest.mark.slow
def test_replicas_stay_equal_to_the_bit_where_weights_are_split_over_depth() -> None:
    run_on_ranks(4, train_own, *[(case("2.5d", depth=2, row=2, col=1),)] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", WITHOUT_DATA)
def test_replicas_stay_equal_to_the_bit_in_all_modes(world: int) -> None:
    run_on_ranks(world, train_own, *[WITHOUT_DATA[world]] * 2)


def compare_depth_one(names: tuple[str, ...]) -> None:
    """2.5d with depth 1 is 2d, bit for bit."""
    for name in names:
        serial, found = seeded(LANGUAGE_MODELS[name], torch.float32), []
        for mode, axes in (CASES[4][2], CASES[4][3]):
            model = copy.deepcopy(serial)
            parallelize(model, mesh_of(axes), mode)
            loss = loss_of(model, *tokens(4, VOCAB))
            loss.backward()
            found.append((loss, [p.grad for p in model.parameters()]))
        (loss, grads), (other, others) = found
        assert torch.equal(loss, other)
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpt", "classic"])
def test_depth_one_is_2d_to_the_bit(name: str) -> None:
    run_on_ranks(4, compare_depth_one, (name,))


# -- recomputation --------------------------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """A block whose activations are recomputed in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        if not torch.is_grad_enabled():
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=False, context_fn=checkpoint_contexts)


def compare_recomputed(cases: tuple[Case, ...]) -> None:
    serial = seeded(lambda: Classic(dropout=0.2)).train()
    ids, labels = tokens(4, VOCAB)
    for mode, axes in cases:
        found = []
        for recompute in (False, True):
            model = copy.deepcopy(serial)
            parallelize(model, mesh_of(axes), mode)
            if recompute:
                for i, block in enumerate(model.blocks):
                    model.blocks[i] = Recomputed(block)
            with dropout_stream(5, 1):
                loss = loss_of(model, ids, labels)
                loss.backward()
            names = (name.replace("block.", "") for name, _ in model.named_parameters())
            found.append((loss, dict(zip(names, (p.grad for p in model.parameters()), strict=True))))
        assert torch.equal(found[0][0], found[1][0])
        assert_gradients_equal(found[1][1], found[0][1], f"{mode} on {axes}")


@pytest.mark.parametrize(
    "cases", [COVERING[3:], pytest.param(COVERING[1:3], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_recomputed_blocks_drop_the_same_elements(cases: tuple[Case, ...]) -> None:
    run_on_ranks(4, compare_recomputed, cases)


# -- a mode of one's own --------------------------------------------------------------------------------------------

GRID = dict(
    residual="m:u h:v",
    column="k:u n:v",
    hidden="m:u n:v",
    row="k:u n:v",
    embedding="v:u h:v",
    ids="m v:u",
    head="k:u v:v",
    logits="m:u v:v",
)
OWN = (
    (Mode(name="mine", axes=("u", "v"), **GRID), (("u", 2), ("v", 2))),
    (
        Mode(
            name="weights over depth too",
            axes=("d", "r", "c"),
            residual="m:d,r h:c",
            column="k:r,d n:c",
            hidden="m:d,r n:c",
            row="k:r,d n:c",
            embedding="v:r,d h:c",
            ids="m:d v:r",
            head="k:r,d v:c",
            logits="m:d,r v:c",
        ),
        (("d", 2), ("r", 2), ("c", 1)),
    ),
    (
        Mode(
            name="fsdp",
            axes=("t",),
            residual="m:t h",
            column="k:t n",
            hidden="m:t n",
            row="k n:t",
            embedding="v:t h",
            ids="m:t v",
            head="k v:t",
            logits="m:t v",
        ),
        (("t", 4),),
    ),
    (
        Mode(
            name="heads over two axes",
            axes=("u", "v"),
            residual="m h",
            column="k n:u,v",
            hidden="m n:u,v",
            row="k:u,v n",
            embedding="v:v,u h",
            ids="m v:v,u",
            head="k v:v,u",
            logits="m v:v,u",
        ),
        (("u", 2), ("v", 2)),
    ),
    (
        Mode(
            name="fsdp × 1d + sequence",
            axes=("f", "t"),
            residual="m:f,t h",
            column="k:f n:t",
            hidden="m:f n:t",
            row="k:t,f n",
            embedding="v:t,f h",
            ids="m:f v:t",
            head="k:f v:t",
            logits="m:f v:t",
        ),
        (("f", 2), ("t", 2)),
    ),
)


def own_modes(index: int, names: tuple[str, ...]) -> None:
    for name in names:
        compare_language_model(LANGUAGE_MODELS[name], (OWN[index],), 4, VOCAB)


@pytest.mark.few(1)
@pytest.mark.parametrize("index", range(len(OWN)), ids=[mode.name for mode, _ in OWN])
def test_a_mode_of_ones_own(index: int) -> None:
    """One of two models each; the slow test has all."""
    run_on_ranks(4, own_modes, index, (("classic", "llama with one key/value head")[index % 2],))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(OWN)), ids=[mode.name for mode, _ in OWN])
def test_a_mode_of_ones_own_with_every_model(index: int) -> None:
    run_on_ranks(4, own_modes, index, tuple(LANGUAGE_MODELS))
