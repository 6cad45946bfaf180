"""Logits beside a loss are the serial model's when somebody reads them, with gradients; nobody else pays for them."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
from tensor_parallel_models import HIDDEN, VOCAB, Flat, exact_reference, hugging_face
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError, record
from meshfold.mesh.model_io.lazy_tensor import LazyTensor
from meshfold.mesh.testing import run_on_ranks
from meshfold.tensor_parallel import parallelize

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
GRIDS: tuple[Case, ...] = (
    case("1d", tensor=2),
    case("1d+sequence", tensor=2),
    case("2d", row=1, col=2),
    case("2d", row=2, col=1),
    case("2.5d", depth=2, row=1, col=1),
    case("3d", a=2, b=1, c=1),
    case("3d", a=1, b=2, c=1),
    case("3d", a=1, b=1, c=2),
)
FOUR: tuple[Case, ...] = (case("2d", row=2, col=2), case("3d", a=1, b=2, c=2), case("3d", a=2, b=2, c=1))
ROWS, SEQUENCE = 3, 8  # three rows fit no split of a batch: they are filled up


class Both(NamedTuple):
    """An output that is a tuple."""

    loss: Tensor
    logits: Tensor


class Capped(Flat):
    """Logits are scaled and capped behind the head, cast, and handed out in a tuple, as those of every sequence."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        loss, self.loss = self.loss, nn.Identity()
        logits = super().forward(input_ids).logits if labels is None else None
        self.loss = loss
        if logits is not None:
            return logits
        x = self.embed(input_ids.reshape(-1))
        for block in self.blocks:
            x = block(x, input_ids.shape[1])
        logits = 3.0 * torch.tanh(self.head(self.norm(x)) / 3.0)
        found = loss(logits, labels)
        return Both(found, logits.view(-1, input_ids.shape[1], logits.shape[-1]) * 0.5)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": partial(hugging_face, "gpt2"),
    "llama": partial(hugging_face, "llama"),
    "llama, tied": partial(hugging_face, "llama", tie_word_embeddings=True),
    "gpt of our own": partial(Flat, gated=False),
    "capped": partial(Capped, gated=True),
}


def tokens(vocabulary: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, vocabulary, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3] = labels[-1, 1:6] = -100
    return ids, labels


def own_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A user's: smoothed, and of another scale than the model's."""
    rows = logits.view(*labels.shape, -1)[:, :-1]
    return 2.0 * F.cross_entropy(rows.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def made(name: str) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """A model, the reference to it, and what both are called with."""
    serial = seeded(MODELS[name])
    ids, labels = tokens(101 if hasattr(serial, "config") else VOCAB)
    given: dict[str, Any] = dict(input_ids=ids, labels=labels)
    reference = copy.deepcopy(serial)
    if hasattr(serial, "config"):
        given["use_cache"] = False
        exact_reference(reference)
    return serial, reference, given


def compare(name: str, cases: tuple[Case, ...], beside: bool) -> None:
    """Values, and every gradient of the user's loss, by itself or ``beside`` the model's."""
    serial, reference, given = made(name)
    wanted = reference(**given)
    total = own_loss(wanted.logits, given["labels"]) + (wanted.loss if beside else 0.0)
    total.backward()
    for mode, axes in cases:
        what = f"{name} in {mode} on {dict(axes)}"
        model, mesh = copy.deepcopy(serial), mesh_of(axes)
        parallelize(model, mesh, mode)
        for _ in range(2):  # the second is not looked at
            model.zero_grad()
            with record() as log:
                found = model(**given)
                assert isinstance(found.logits, LazyTensor) and found.logits.shape == wanted.logits.shape, what
                gathered = [entry for entry in log.entries if entry.kind == "all_gather"]
                assert mode != "1d" or not gathered
            loss = own_loss(found.logits, given["labels"]) + (found.loss if beside else 0.0)
            loss.backward()
            assert_gradients_equal({"loss": loss}, {"loss": total}, what)
            assert_gradients_equal({"logits": found.logits}, {"logits": wanted.logits}, what)
            assert_gradients_equal(whole_gradients(model, mesh), gradients(reference), what)
        with torch.no_grad():
            ids = model.eval()(**given).logits.argmax(-1)
        assert torch.equal(ids, wanted.logits.argmax(-1)), what


@pytest.mark.few(1)
@needs_transformers
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_beside_a_loss_are_the_serial_ones(name: str) -> None:
    run_on_ranks(2, compare, name, GRIDS[:4:3], True)


@pytest.mark.few(2)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_those_of_a_flat_stream_are_too(grid: Case) -> None:
    run_on_ranks(2, compare, "gpt of our own", (grid,), False)


@pytest.mark.few(1)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_follows_the_head_may_change_them(grid: Case) -> None:
    run_on_ranks(2, compare, "capped", (grid,), True)


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("beside", [False, True])
def test_every_model_hands_out_the_serial_logits_in_every_mode(name: str, beside: bool) -> None:
    run_on_ranks(2, compare, name, GRIDS, beside)
    run_on_ranks(4, compare, name, FOUR, beside)


# -- what they go through -------------------------------------------------------------------------------------------


def through_others() -> None:
    serial, reference, given = made("gpt2")
    model = copy.deepcopy(serial)
    parallelize(model, mesh_of((("tensor", 2),)), "1d")
    wanted = reference(**given)
    values = wanted.logits.detach()

    def same(found: Tensor) -> None:
        torch.testing.assert_close(found.double(), values.to(found.dtype).double(), rtol=1e-6, atol=1e-6)

    output = model(**given)
    assert type(output) is type(wanted) and output.to_tuple()[1] is output.logits
    assert "put together when they are read" in repr(output)
    same(output["logits"].detach().cpu().float())
    same(model(**given, return_dict=False)[1].to(torch.float32).detach())
    same(torch.utils._pytree.tree_map(lambda x: x.float(), model(**given)).logits.detach())
    with torch.no_grad():
        same(copy.deepcopy(model(**given)).logits)
        same(pickle.loads(pickle.dumps(model(**given))).logits)
    with torch.inference_mode():
        same(model(**given).logits + 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**given).logits.argmax(-1).shape == given["labels"].shape
    twin = copy.deepcopy(model)
    same(twin(**given).logits.detach().clone())


@needs_transformers
def test_they_survive_what_outputs_go_through() -> None:
    run_on_ranks(2, through_others)


def compiled() -> None:
    serial, reference, given = made("gpt of our own")
    model, mesh = copy.deepcopy(serial), mesh_of((("tensor", 2),))
    parallelize(model, mesh, "1d")
    found = torch.compile(model, backend="aot_eager", dynamic=False)(**given)
    wanted = reference(**given)
    own_loss(found.logits, given["labels"]).backward()
    own_loss(wanted.logits, given["labels"]).backward()
    assert_gradients_equal(whole_gradients(model, mesh), gradients(reference))


@pytest.mark.slow
def test_those_of_a_compiled_model_are_whole_too() -> None:
    run_on_ranks(2, compiled)


# -- what is no logits ----------------------------------------------------------------------------------------------


class WithStream(Flat):
    """Hands out the residual stream too, as wide as a rank's piece of the logits in 1d, and logits turned round."""

    def __init__(self) -> None:
        super().__init__(gated=True, vocab=2 * HIDDEN)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids.reshape(-1))
        for block in self.blocks:
            x = block(x, input_ids.shape[1])
        x = self.norm(x)
        logits = self.head(x)
        loss = None if labels is None else self.loss(logits, labels)
        return dict(loss=loss, logits=logits, stream=x, turned=logits.t())


def others() -> None:
    serial = seeded(WithStream)
    ids, labels = tokens(2 * HIDDEN)
    wanted = serial(ids, labels)
    for mode, axes in (GRIDS[0], GRIDS[2]):
        model = copy.deepcopy(serial)
        parallelize(model, mesh_of(axes), mode)
        for _ in range(2):
            found = model(ids, labels)
            torch.testing.assert_close(found["logits"].clone(), wanted["logits"])
            if mode == "1d":
                assert type(found["stream"]) is Tensor
                torch.testing.assert_close(found["stream"], wanted["stream"])
            else:
                with pytest.raises(LayoutError, match=r"output\.stream, .* is split over col and cannot be read"):
                    found["stream"].sum()
            with pytest.raises(LayoutError, match=r"output\.turned, .* only logits, .* are gathered"):
                found["turned"].sum()


def test_what_is_split_and_no_logits_is_refused_when_it_is_read() -> None:
    run_on_ranks(2, others)
