"""Logits beside a loss, in a loop of one's own: the serial ones for those who read them, nothing for those who do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshfold.engine import Engine
from meshfold.mesh import CollectiveError, record
from meshfold.mesh.model_io.lazy_tensor import LazyTensor
from meshfold.mesh.testing import close_pools, run_on_ranks
from meshfold.mesh.watchdog import diagnosis
from meshfold.models import GPT, GPTConfig

VOCABULARY, LENGTH = 37, 11
WHOLE = (VOCABULARY, VOCABULARY + 1)  # without padding and with it
Spec = Mapping[str, Any]


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCABULARY, hidden=32, layers=2, heads=4, max_positions=16))


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.GPT2LMHeadModel(  # type: ignore[no-any-return]
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=16,
            bos_token_id=0,
            eos_token_id=0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
        )
    )


MODELS = {"gpt": gpt, "gpt2": gpt2}


def batch(rows: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.view(*labels.shape, -1)[:, :-1]
    return F.cross_entropy(rows.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def stepped(name: str, parallel: Spec) -> tuple[dict[str, Tensor], Tensor]:
    """Of a step of size 1 with a loss of the logits and the model's own, so that a factor shows.

    Returns:
        The weights after it; what was predicted before it of all rows, without labels.
    """
    with Engine(MODELS[name], parallel, optimizer=dict(name="sgd", lr=1.0), precision="fp64", watchdog=60.0) as engine:
        with torch.no_grad():
            wanted = engine.model.eval()(batch()["input_ids"]).logits.argmax(-1)
        mine = engine.shard_batch(batch())
        output = engine(**mine)
        predicted = output.logits.argmax(-1).view(-1, LENGTH)
        engine.backward(output.loss + 3.0 * shifted(output.logits, mine["labels"]))
        engine.step()
        assert torch.equal(predicted, engine.shard_batch(dict(input_ids=wanted))["input_ids"]), parallel
        return engine.full_state_dict(), wanted


def compare(name: str, specs: Sequence[Spec]) -> None:
    weights, predicted = stepped(name, {})
    for parallel in specs:
        found, mine = stepped(name, parallel)
        assert torch.equal(mine, predicted), parallel
        for key, value in weights.items():
            # transformers computes its loss in float32.
            tolerance = 1e-10 if name == "gpt" else 1e-5
            difference = float((found[key] - value).abs().max())
            assert difference <= tolerance, f"{parallel}: {key} is off by {difference:.3g}"


TWO: tuple[Spec, ...] = (
    dict(tensor=2),
    dict(tensor=2, sequence=dict(mode="megatron")),
    dict(sequence=dict(mode="ring", size=2)),
)
FOUR: tuple[Spec, ...] = (
    dict(tensor=dict(mode="2d", size=4)),
    dict(tensor=2, sequence=dict(mode="ring", size=2)),
    dict(data=2, tensor=2, zero=dict(stage=3)),
)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_loss_of_the_logits_trains_as_one_process_does(name: str) -> None:
    run_on_ranks(2, compare, name, TWO)


def test_under_specs_of_several_kinds_too() -> None:
    run_on_ranks(4, compare, "gpt", FOUR)


# -- those who do not read ------------------------------------------------------------------------------------------


class Widest(TorchDispatchMode):
    """Notes tensors that have as many columns as there are words."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[-1] in WHOLE:
                self.found.append(f"{func} {tuple(leaf.shape)}")
        return out


def steps_that_read_nothing(name: str) -> None:
    with Engine(MODELS[name], dict(tensor=2), optimizer=dict(name="sgd", lr=0.1)) as engine:
        for way in ("first", "train_step", "loop", "eval_step"):
            with record() as log, Widest() as widest:
                if way == "loop":
                    output = engine(**batch())
                    assert isinstance(output.logits, LazyTensor)
                    engine.backward(output.loss)
                    engine.step()
                elif way == "eval_step":
                    engine.eval_step(batch())
                else:
                    engine.train_step(batch())
            assert not [entry for entry in log.entries if entry.kind == "all_gather"], way
            assert not widest.found, (way, widest.found)
        with record() as log, Widest() as widest:
            output.logits.clone()
        assert widest.found and [entry.kind for entry in log.entries] == ["all_gather"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_makes_no_whole_logits(name: str) -> None:
    run_on_ranks(2, steps_that_read_nothing, name)


# -- one rank alone -------------------------------------------------------------------------------------------------


def one_rank_looks() -> tuple[str, float]:
    diagnosis._BEAT_S = 0.2  # of this pool's ranks, which end with the test
    with Engine(gpt, dict(tensor=2), optimizer=dict(name="sgd", lr=0.1), watchdog=100.0) as engine:
        began = time.monotonic()
        try:
            for _ in range(2):
                output = engine(**batch())
                engine.backward(output.loss)
                engine.step()
                if engine.mesh.rank == 0:
                    print(output)
                    print(output.logits.argmax(-1))
        except CollectiveError as error:
            return str(error), time.monotonic() - began
    return "", 0.0


def one_rank_looks_in_its_loss() -> tuple[str, float]:
    """Look where the loss leaves logits out that every rank would have whole."""
    return looked_in_a_loss(dict(tensor=2))


def one_rank_computes_a_loss() -> tuple[str, float]:
    """Compute one more loss than the other rank, which meets it in its own; their next collectives would not fit."""
    return looked_in_a_loss(dict(tensor=2), crossed)


def one_rank_computes_a_loss_of_some_rows() -> tuple[str, float]:
    return looked_in_a_loss(dict(tensor=2), lambda logits, ids: crossed(logits[:1], ids[:1]))


def one_rank_computes_a_loss_of_whole_sequences() -> tuple[str, float]:
    return looked_in_a_loss(dict(sequence=dict(mode="ring", size=2)), crossed)


def one_rank_looks_at_whole_sequences() -> tuple[str, float]:
    """Do so where ranks have tokens of them."""
    return looked_in_a_loss(dict(sequence=dict(mode="ring", size=2)))


def crossed(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def looked_in_a_loss(
    parallel: Spec, look: Callable[[Tensor, Tensor], Tensor] = lambda logits, ids: logits.argmax(-1)
) -> tuple[str, float]:
    diagnosis._BEAT_S = 0.2
    steps, ids = [], batch()["input_ids"]

    def loss_fn(output: Any, given: Any) -> Tensor:
        steps.append(1)
        if engine.mesh.rank == 0 and len(steps) > 1:
            print(look(output.logits, ids))
        return crossed(output.logits, ids)

    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=0.1), kernels=dict(loss=True), watchdog=100.0)
    with Engine(gpt, parallel, loss_fn=loss_fn, **settings) as engine:
        began = time.monotonic()
        try:
            for _ in range(2):
                engine.train_step(dict(input_ids=ids))
        except CollectiveError as error:
            return str(error), time.monotonic() - began
    return "", 0.0


@pytest.mark.parametrize("look", [one_rank_looks, one_rank_looks_in_its_loss, one_rank_looks_at_whole_sequences])
def test_a_rank_that_looks_alone_is_told_what_to_write(look: Callable[[], tuple[str, float]]) -> None:
    close_pools()
    try:
        found = run_on_ranks(2, look)
    finally:
        close_pools()
    text, seconds = found[0]
    what = "the output of head" if look is one_rank_looks_in_its_loss else "output.logits"
    assert text.startswith(f"{what} cannot be read at test_read_logits.py:") and seconds < 80.0
    assert "Read it on all ranks and use the result on one" in text
    assert "rank 0 failed" in found[1][0] and f"{what} cannot be read" in found[1][0]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "look",
    [
        one_rank_computes_a_loss,
        one_rank_computes_a_loss_of_whole_sequences,
        one_rank_computes_a_loss_of_some_rows,
    ],
)
def test_a_rank_that_computes_a_loss_alone_is_told_what_to_write(look: Callable[[], tuple[str, float]]) -> None:
    close_pools()
    try:
        found = run_on_ranks(2, look)
    finally:
        close_pools()
    what = "output.logits" if look is one_rank_computes_a_loss_of_whole_sequences else "the output of head"
    begins = f"a loss of {what} cannot be computed at test_read_logits.py:"
    assert any(text.startswith(begins) for text, _ in found), found
    assert all(begins in text and "Compute it on all ranks and use the result on one" in text for text, _ in found)
    assert all(seconds < 80.0 for _, seconds in found)


# -- in stages ------------------------------------------------------------------------------------------------------


def stages_beside_labels() -> None:
    given = batch()
    with Engine(gpt, {}, precision="fp64") as serial, torch.no_grad():
        wanted = serial.model.eval()(**given).logits
    with Engine(
        gpt, dict(pipeline=dict(size=2, microbatches=2), tensor=2), optimizer=dict(name="sgd", lr=0.1), precision="fp64"
    ) as engine:
        assert engine.pipeline is not None
        found = engine.pipeline.eval()(given["input_ids"], labels=given["labels"])
        torch.testing.assert_close(found.logits, wanted, rtol=1e-10, atol=1e-10)
        engine.train_step(given)


def test_a_pipeline_hands_out_whole_logits_beside_labels() -> None:
    run_on_ranks(4, stages_beside_labels)
