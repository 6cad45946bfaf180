"""Processes killed by SIGKILL in the middle of a step or of a save: the run goes on from the last complete checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.engine import Engine, checkpoint, tensor_files
from meshfold.engine.models import GPT, GPTConfig
from meshfold.engine.tensor_file import TensorWriter
from meshfold.mesh.testing import RankFailure, run_on_ranks

STEPS, EVERY = 6, 2


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=37, hidden=32, layers=1, heads=4, max_positions=16, dropout=0.1))


class Rows:
    """The dataset of some random rows."""

    def __init__(self) -> None:
        self._rows = torch.randint(37, (20, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[i], "labels": self._rows[i]}


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)


def run(parallel: dict[str, Any], path: str, death: str = "", rank: int = 0) -> tuple[int, list[float]]:
    """Train to the last step, from the last checkpoint if there is one, unless killed on the way.

    Returns:
        The step that the run began at, and the losses from there on.
    """
    engine = Engine(
        gpt, parallel, optimizer=dict(name="adamw", lr=1e-2), clip_grad_norm=0.5, lr_scheduler=halving
    )
    me = torch.distributed.get_rank()
    tensor_files.LEAST_BYTES = 1  # let all ranks write, however little there is
    if Path(path).exists() or Path(path).with_name(".ckpt.old").exists():
        engine.load(path)
    first, losses = engine.steps, []
    loader = engine.dataloader(Rows(), batch_size=8)
    while engine.steps < STEPS:
        for batch in loader:
            if me == rank and engine.steps == 4 and death in STEP_DEATHS:
                STEP_DEATHS[death](engine)
            losses.append(engine.train_step(batch))
            if engine.steps % EVERY == 0:
                if me == rank and engine.steps == 4 and death in SAVE_DEATHS:
                    SAVE_DEATHS[death]()
                engine.save(path)
            if engine.steps == STEPS:
                break
    tensor_files.LEAST_BYTES = 64 * 2**20
    engine.close()
    return first, losses


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, owner: Any, name: str, *, after: bool = False) -> None:
    """Have the process die at the so-manieth call of a function, or right after it."""
    original = getattr(owner, name)
    calls: list[None] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == number and not after:
            die()
        found = original(*args, **kwargs)
        if len(calls) == number:
            die()
        return found

    setattr(owner, name, counting)


def in_backward(engine: Engine) -> None:
    at_call(1, engine._states, "finish")  # gradients are there, and partly on their way


def in_optimizer(engine: Engine) -> None:
    at_call(
        1, engine._states, "step", after=True
    )  # weights have changed, the scheduler and the counters have not


STEP_DEATHS: dict[str, Callable[[Engine], None]] = {
    "before the sum": in_backward,
    "after the optimizer": in_optimizer,
}
SAVE_DEATHS: dict[str, Callable[[], None]] = {
    "in a tensor": lambda: at_call(5, TensorWriter, "write"),
    "before a file is on the disk": lambda: at_call(1, TensorWriter, "close"),
    "before the folder is complete": lambda: at_call(1, checkpoint, "_finish"),
    "before the old one is moved": lambda: at_call(1, Path, "rename"),
    "between the renames": lambda: at_call(2, Path, "rename"),
    "before the old one is removed": lambda: at_call(2, Path, "rename", after=True),
}
# Rank 0 alone does these.
ONLY_FIRST = tuple(SAVE_DEATHS)[2:]
# The step that the last complete checkpoint is of, where it is another than 2.
RESUMES = {"before the old one is removed": 4, **dict.fromkeys(STEP_DEATHS, 4)}
FEW = ("after the optimizer", "in a tensor", "between the renames")
CASES: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "one": (1, {}, (*STEP_DEATHS, *SAVE_DEATHS)),
    "one, zero": (1, dict(zero=dict(stage=3, placement="cpu")), FEW),
    "two": (2, dict(data=2), FEW),
    "two, zero": (2, dict(data=2, zero=dict(stage=3, placement="cpu")), ("before the sum", *FEW[1:])),
}


@pytest.mark.parametrize(
    "case",
    [case if case in ("one", "two, zero") else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_a_killed_run_goes_on_to_the_same_losses(case: str, tmp_path: Path) -> None:
    size, parallel, deaths = CASES[case]
    unbroken = run_on_ranks(size, run, parallel, str(tmp_path / "unbroken" / "ckpt"))[0]
    assert unbroken[0] == 0 and len(set(unbroken[1])) == STEPS
    for death in deaths:
        folder = tmp_path / death
        victim = 0 if death in ONLY_FIRST else size - 1
        with pytest.raises(RankFailure, match="SIGKILL"):
            run_on_ranks(size, run, parallel, str(folder / "ckpt"), death, victim)
        first, losses = run_on_ranks(size, run, parallel, str(folder / "ckpt"))[0]
        assert first == RESUMES.get(death, 2), death
        assert losses == unbroken[1][first:], death  # to the bit
        assert [p.name for p in folder.iterdir()] == ["ckpt"], death
