"""A closed engine: every method says that it is closed, and closing again does nothing."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshfold.engine import CheckpointError, Engine, TrainingError

PUBLIC: dict[str, tuple[Any, ...]] = {
    "train_step": (None,),
    "run_step": (None,),
    "__call__": (None,),
    "backward": (None,),
    "no_sync": (),
    "step": (),
    "zero_grad": (),
    "eval_step": (None,),
    "eval_loss": (None,),
    "count_targets": (None,),
    "predict": (None,),
    "shard_batch": (None,),
    "dataloader": ([], 1),
    "full_state_dict": (),
    "load_state_dict": ({},),
    "save": ("nowhere",),
    "load": ("nowhere",),
    "save_hugging_face": ("nowhere",),
    "__enter__": (),
}


def test_every_public_method_of_a_closed_engine_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(nn.Linear(2, 2), {}, optimizer="sgd", loss_fn=lambda output, batch: output.mean())
    engine.train_step((torch.ones(2, 2), torch.ones(2)))
    engine.close()
    engine.close()
    methods = {name for name, method in vars(Engine).items() if inspect.isfunction(method) and not name.startswith("_")}
    assert methods == {*PUBLIC} - {"__call__", "__enter__"} | {"close", "print"}
    for name, arguments in PUBLIC.items():
        with pytest.raises(TrainingError, match=r"this engine is closed\. Call it before close"):
            getattr(engine, name)(*arguments)
    engine.print("still printed")
    assert capsys.readouterr().out == "still printed\n"
    assert engine.steps == 1 and engine.last is not None


def test_an_engine_whose_save_failed_is_closed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(nn.Linear(2, 2), {}, optimizer="sgd", loss_fn=lambda output, batch: output.mean())

    def fail() -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(engine.saver, "finish", fail)
    with pytest.raises(CheckpointError, match="the disk is full"):
        engine.close()
    engine.close()
    assert engine.lifetime.is_over and engine.mesh.is_closed
