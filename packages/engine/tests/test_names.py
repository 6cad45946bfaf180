"""Checkpoints do not know whether blocks were compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshfold.engine import Engine
from meshfold.engine.checkpoints.checkpoint import Checkpoint
from meshfold.engine.checkpoints.model_state import with_plain_names
from meshfold.mesh.parameters.parameter_meta import uncompiled_name
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig

ZEROS: list[dict[str, Any]] = [
    {},
    dict(zero=dict(stage=3, placement="cpu")),
    dict(zero=dict(stage=1, placement="cuda")),
]
Change = Callable[[nn.Module], None]


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=37, hidden=32, layers=2, heads=4, max_positions=16))


def compile_blocks(model: nn.Module) -> None:
    assert isinstance(model, GPT)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block, backend="eager")  # type: ignore[assignment]


def leave(model: nn.Module) -> None:
    pass


def engine_of(parallel: dict[str, Any], before: Change, after: Change, name: str = "adamw") -> Engine:
    model = gpt()
    model.load_state_dict(first_weights())
    before(model)
    engine = Engine(model, parallel, optimizer=dict(name=name, lr=1e-2), clip_grad_norm=0.5)
    after(engine.model)
    return engine


def first_weights() -> dict[str, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return copy.deepcopy(gpt().state_dict())


def batch(number: int) -> torch.Tensor:
    return torch.randint(37, (4, 8), generator=torch.Generator().manual_seed(number))


def go_through(folder: str, parallel: dict[str, Any], name: str) -> None:
    """Save and load between engines whose blocks are compiled before the engine, after it, or not: always the same run."""
    ways: list[tuple[Change, Change]] = [(leave, leave), (compile_blocks, leave), (leave, compile_blocks)]
    wanted = None
    plain_names = set(gpt().state_dict())
    for number, way in enumerate(ways):
        engine = engine_of(parallel, *way, name)
        losses = [engine.train_step(engine.shard_batch(batch(step))) for step in range(2)]
        engine.save(f"{folder}/{number}")
        assert set(engine.full_state_dict()) == plain_names
        saved = Checkpoint(f"{folder}/{number}")
        assert set(saved.model) == plain_names - set(saved.state["ties"])
        assert not any("_orig_mod" in key for key in saved.optimizer)
        assert "_orig_mod" not in str(saved.state)
        losses += [engine.train_step(engine.shard_batch(batch(step))) for step in range(2, 4)]
        engine.close()
        wanted = wanted or losses
        assert losses == wanted, way
    for number in range(len(ways)):
        for way in ways:
            engine = engine_of(parallel, *way, name)
            engine.load(f"{folder}/{number}")
            assert [engine.train_step(engine.shard_batch(batch(step))) for step in range(2, 4)] == wanted[2:], (
                number,
                way,
            )
            engine.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [(0, "adamw"), (0, "sgd"), (1, "adamw"), (2, "sgd")])
def test_checkpoints_of_compiled_blocks(case: tuple[int, str], tmp_path: Path) -> None:
    run_on_ranks(1, go_through, str(tmp_path), ZEROS[case[0]], case[1])


def of_ranks(folder: str) -> None:
    go_through(folder, dict(data=2, **ZEROS[1]), "adamw")


@pytest.mark.slow
def test_checkpoints_of_compiled_blocks_on_two_ranks(tmp_path: Path) -> None:
    run_on_ranks(2, of_ranks, str(tmp_path))


def made_here(compiled: bool) -> GPT:
    made = GPT(GPTConfig(vocab_size=37, hidden=32, layers=2, heads=4, max_positions=16, dropout=0.2))
    if compiled:
        compile_blocks(made)
    return made


def losses_of_one_made_here(compiled: bool) -> list[float]:
    optimizer = dict(name="adamw", lr=1e-2)
    with Engine(partial(made_here, compiled), dict(tensor=2), optimizer=optimizer, precision="fp64") as engine:
        return [engine.train_step(dict(input_ids=batch(step), labels=batch(step))) for step in range(3)]


@pytest.mark.slow
def test_compiled_blocks_begin_with_the_same_weights_and_drop_the_same_elements() -> None:
    eager, compiled = (run_on_ranks(2, losses_of_one_made_here, way)[0] for way in (False, True))
    assert compiled == pytest.approx(eager, rel=1e-12)


def test_a_state_dict_of_a_compiled_model_goes_in() -> None:
    compiled = torch.compile(gpt(), backend="eager")
    state = compiled.state_dict()
    assert all(name.startswith("_orig_mod.") for name in state)
    engine = engine_of({}, leave, leave)
    engine.load_state_dict(state)
    found = engine.full_state_dict()
    assert all(torch.equal(found[uncompiled_name(name)], value) for name, value in state.items())
    engine.close()


def test_plain_names() -> None:
    assert uncompiled_name("_orig_mod.a.b") == "a.b"
    assert uncompiled_name("a._orig_mod._orig_mod.b") == "a.b"
    assert uncompiled_name("a.not_orig_mod.b") == "a.not_orig_mod.b"
    assert with_plain_names({"a.b": 1, "_orig_mod.a.b": 2, "c": 3}) == {"a.b": 1, "c": 3}
