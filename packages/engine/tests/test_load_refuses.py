"""A checkpoint that does not fit is refused before anything of the engine has changed, on every rank."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, SequentialLR, StepLR

from meshfold.engine import CheckpointError, Engine
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from checkpoint_edits import edit_state

ADAMW: dict[str, Any] = dict(name="adamw", lr=1e-2)


def gpt(hidden: int = 32, frozen: str = "") -> GPT:
    model = GPT(GPTConfig(vocab_size=37, hidden=hidden, layers=2, heads=4, max_positions=16))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    return model


class Rows:
    """The dataset of some rows."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = (torch.arange(8) + i) % 37
        return {"input_ids": row, "labels": row}


def halving(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, 2, gamma=0.5)


def one_after_another(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [StepLR(optimizer, 1), StepLR(optimizer, 2)], [3])


class Picky(StepLR):
    """Has taken some of a state when it finds that some is missing."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mood": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        state["mood"]


def picky(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return Picky(optimizer, 5)


def engine_of(parallel: dict[str, Any], *, examples: int = 20, **options: Any) -> tuple[Engine, Any]:
    given = dict(model=gpt, optimizer=ADAMW, lr_scheduler=halving) | options
    engine = Engine(given.pop("model"), parallel, **given)
    return engine, engine.dataloader(Rows(examples), batch_size=4)


def saved(path: Path) -> None:
    engine, loader = engine_of({})
    for number, batch in enumerate(loader):
        engine.train_step(batch)
        if number == 2:
            break
    engine.save(path)
    engine.close()


def everything(engine: Engine, loader: Any) -> tuple[dict[str, Tensor], Any]:
    optimizer = engine.optimizer
    rest: list[Any] = [
        loader.state_dict(),
        engine.steps,
        engine.micro_step,
        engine.skipped_steps,
        engine.runner.seed,
    ]
    if optimizer is not None:
        rest += [[{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]]
        tensors = engine.model_state.optimizer_sources()
        rest += [{name: source.read().tolist() for name, source in tensors.items()}]
    scheduler = engine.lr_scheduler
    rest += [None if scheduler is None else json.dumps(scheduler.state_dict(), default=str)]
    return engine.full_state_dict(), copy.deepcopy(rest)


def cut_off(path: str) -> None:
    """The weights alone can be read."""
    edit_state(Path(path), lambda state: (state.pop("seed"), state.pop("data")))


# What is other than in the checkpoint, what is done to the checkpoint before, and what is said.
CASES: dict[str, tuple[dict[str, Any], Callable[[str], None] | None, str]] = {
    "optimizer": (dict(optimizer=dict(name="sgd", lr=0.1)), None, "the state of AdamW, but this engine has SGD"),
    "groups": (
        dict(optimizer={**ADAMW, "no_decay": "norms_and_biases"}),
        None,
        "1 parameter groups, but this one has 2",
    ),
    "frozen": (
        dict(model=lambda: gpt(frozen="norm.weight")),
        None,
        "'norm.weight', which is not trained here",
    ),
    "model": (dict(model=lambda: gpt(hidden=16)), None, "has shape"),
    "scheduler": (dict(lr_scheduler=one_after_another), None, "does not fit SequentialLR"),
    "scheduler, half taken": (dict(lr_scheduler=picky), None, "does not fit Picky"),
    "data": (dict(examples=24), None, "examples would be skipped or repeated"),
    "without a seed": ({}, cut_off, "its state.json has no seed, data: it is damaged"),
}


def refused(parallel: dict[str, Any], path: str, case: str) -> None:
    options, _, message = CASES[case]
    engine, loader = engine_of(parallel, **options)
    for batch in loader:  # it has a state of its own
        engine.train_step(batch)
        break
    weights, rest = everything(engine, loader)
    with pytest.raises((CheckpointError, SpecError), match=message):
        engine.load(path)
    found, rest_found = everything(engine, loader)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert rest_found == rest
    if case != "model":
        engine.load(path, weights_only=True)  # as it says
        found = engine.full_state_dict()
        assert not all(torch.equal(found[name], weights[name]) for name in weights)
    engine.close()


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_changes_nothing(case: str, tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")
    change = CASES[case][1]
    if change is not None:
        change(str(tmp_path / "ckpt"))
    refused({}, str(tmp_path / "ckpt"), case)


def all_refused(parallel: dict[str, Any], path: str) -> None:
    for case in CASES:
        refused(parallel, f"{path}-{case}", case)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "parallel",
    [
        dict(data=2, zero=dict(stage=3, placement="cpu")),
        dict(pipeline=dict(size=2, microbatches=2)),
        pytest.param(dict(tensor=2), marks=pytest.mark.slow),
    ],
    ids=["zero", "pipeline", "tensor"],
)
def test_nor_on_several_ranks(parallel: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path / "ckpt")
    for case, (_, change, _) in CASES.items():
        shutil.copytree(tmp_path / "ckpt", tmp_path / f"ckpt-{case}")
        if change is not None:
            change(str(tmp_path / f"ckpt-{case}"))
    run_on_ranks(2, all_refused, parallel, str(tmp_path / "ckpt"))
