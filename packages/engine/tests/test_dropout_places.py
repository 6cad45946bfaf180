"""What a model drops is what it drops in one process, in whatever order its dims stand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh import LayoutError
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the models beside this file, on every rank
from dropping_models import MODELS, WORDS

SHAPES = ((8, 4), (4, 6))
"""Rows and tokens of two batches; of the first a rank's share of the rows, half of them, is as many as there are tokens."""
State = dict[str, Tensor]


def train(
    name: str, parallel: dict[str, Any], shapes: tuple[tuple[int, int], ...] = SHAPES
) -> tuple[list[float], State]:
    """Losses and weights of two steps, each as large as its gradient."""
    torch.manual_seed(0)
    engine = Engine(
        MODELS[name]().double(),
        parallel,
        optimizer=dict(name="sgd", lr=1.0),
        precision="fp64",
        seed=3,
        loss_fn=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[1].flatten()),
    )
    generator, losses = torch.Generator().manual_seed(1), []
    for shape in shapes:
        ids, targets = (torch.randint(0, WORDS, shape, generator=generator) for _ in range(2))
        losses.append(engine.train_step(engine.shard_batch((ids, targets))))
    return losses, engine.full_state_dict()


def compare(
    wanted: dict[str, tuple[list[float], State]],
    specs: list[dict[str, Any]],
    shapes: tuple[tuple[int, int], ...] = SHAPES,
) -> None:
    for name, (losses, state) in wanted.items():
        for parallel in specs:
            found, after = train(name, parallel, shapes)
            assert found == pytest.approx(losses, rel=1e-12), (name, parallel)
            for key, value in state.items():
                assert torch.allclose(after[key], value, rtol=0, atol=1e-12), (name, parallel, key)


def alone(*names: str, shapes: tuple[tuple[int, int], ...] = SHAPES) -> dict[str, tuple[list[float], State]]:
    return {name: train(name, {}, shapes) for name in names}


def test_a_rank_with_one_row_and_blocks_in_a_dict_drop_what_one_process_drops() -> None:
    shapes = ((3, 4), (3, 6))
    run_on_ranks(2, compare, alone("by hand", shapes=shapes), [dict(data=2)], shapes)
    run_on_ranks(2, compare, alone("named"), [dict(data=2), dict(pipeline=dict(size=2, microbatches=2))])


def compare_some(names: tuple[str, ...], specs: list[tuple[int, dict[str, Any]]], turn: int) -> None:
    """Each spec with one of the models, others for the next turn."""
    wanted = alone(*names)
    for number, (size, parallel) in enumerate(specs):
        name = names[(number + turn) % len(names)]
        run_on_ranks(size, compare, {name: wanted[name]}, [parallel])


PIPED: dict[str, Any] = dict(pipeline=dict(size=2, microbatches=2))


@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_sequence_first_streams_drop_what_one_process_drops(turn: int) -> None:
    specs: list[tuple[int, dict[str, Any]]] = [
        (4, dict(tensor=dict(mode="2d", grid=(2, 2)))),
        (4, dict(data=2, tensor=2)),
        (4, dict(data=2, **PIPED)),
    ]
    compare_some(("turned", "torch's own", "attention"), specs, turn)


@pytest.mark.slow  # each of these entries is beside another one above
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_sequence_first_streams_drop_it_under_one_entry_too(turn: int) -> None:
    specs: list[tuple[int, dict[str, Any]]] = [(2, dict(data=2)), (2, dict(tensor=2)), (2, PIPED)]
    compare_some(("turned", "torch's own", "attention"), specs, turn)


@pytest.mark.slow
def test_sequence_first_streams_whose_tokens_are_split_drop_in_stages_what_one_process_drops() -> None:
    run_on_ranks(4, compare, alone("attention"), [dict(pipeline=2, sequence=dict(mode="ring", size=2))])


def test_sequence_first_streams_whose_tokens_are_split_drop_what_one_process_drops() -> None:
    ring, ulysses = dict(mode="ring", size=2), dict(mode="ulysses", size=2)
    run_on_ranks(4, compare, alone("attention"), [dict(data=2, sequence=ulysses), dict(tensor=2, sequence=ring)])
    megatron = dict(tensor=2, sequence=dict(mode="megatron"))
    run_on_ranks(4, compare, alone("turned", "torch's own"), [dict(data=2, **megatron)])


@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_dims_merged_with_the_batch_drop_what_one_process_drops(turn: int) -> None:
    specs: list[tuple[int, dict[str, Any]]] = [(2, dict(data=2)), (2, dict(tensor=2)), (2, PIPED)]
    compare_some(("mlp", "merged", "windows", "twice"), specs, turn)


def test_a_model_that_repeats_its_blocks_drops_what_it_dropped() -> None:
    """And has the gradients of the same model that keeps them."""
    wanted = {name: train("kept", {}) for name in ("repeated", "reentrant")}
    compare(wanted, [{}])
    run_on_ranks(2, compare, wanted, [dict(data=2)])
    piped = {"repeated": wanted["repeated"]}
    run_on_ranks(2, compare, piped, [dict(pipeline=dict(size=2, microbatches=2))])


def own_loop(name: str) -> State:
    """Two forwards, then backward through both."""
    torch.manual_seed(0)
    engine = Engine(MODELS[name]().double(), optimizer=dict(name="sgd", lr=1.0), precision="fp64")
    ids = torch.randint(0, WORDS, (4, 6))
    outputs = [engine(ids), engine(ids.flip(0))]
    engine.backward(sum(F.cross_entropy(output.flatten(0, 1), ids.flatten()) for output in outputs))
    engine.step()
    return engine.full_state_dict()


def test_in_a_loop_of_ones_own_too() -> None:
    kept = own_loop("kept")
    for name in ("repeated", "reentrant"):
        assert all(torch.equal(value, kept[key]) for key, value in own_loop(name).items())


def refused(name: str, parallel: dict[str, Any]) -> None:
    with pytest.raises(LayoutError) as raised:
        train(name, parallel)
    assert "other elements than one process" in str(raised.value)
    assert "set its probability to 0" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [("chosen", dict(data=2)), ("turned", dict(tensor=dict(mode="3d", grid=(1, 1, 2))))],
    ids=["rows chosen by what they are", "tokens exchanged along the first dim"],
)
def test_what_could_not_drop_alike_is_refused(name: str, parallel: dict[str, Any]) -> None:
    run_on_ranks(2, refused, name, parallel)
