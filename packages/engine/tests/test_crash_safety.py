"""Processes killed by SIGKILL in the middle of a step or of a save: the run goes on from the last complete checkpoint."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.checkpoint.folder import replacement, writing
from meshfold.checkpoint.tensors import TensorWriter, file_set
from meshfold.engine import Engine
from meshfold.engine.checkpoints import checkpoint, saving
from meshfold.engine.checkpoints.checkpoint import Checkpoint
from meshfold.mesh.testing import RankFailure, run_on_ranks
from meshfold.models import GPT, GPTConfig

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


def run(
    parallel: dict[str, Any], path: str, death: str = "", rank: int = 0, asynchronous: bool = False
) -> tuple[int, list[float]]:
    """Train to the last step, from the last checkpoint if there is one, unless killed on the way.

    Args:
        death: where, or after how many seconds from the first save on.

    Returns:
        The step that the run began at, and the losses from there on.
    """
    engine = Engine(gpt, parallel, optimizer=dict(name="adamw", lr=1e-2), clip_grad_norm=0.5, lr_scheduler=halving)
    me = torch.distributed.get_rank()
    file_set.LEAST_BYTES = 1  # let all ranks write, however little there is
    if Path(path).exists():
        engine.load(path)
    first, losses = engine.steps, []
    loader = engine.dataloader(Rows(), batch_size=8)
    while engine.steps < STEPS:
        for batch in loader:
            if me == rank and engine.steps == 4 and death in STEP_DEATHS:
                STEP_DEATHS[death](engine)
            losses.append(engine.train_step(batch))
            if engine.steps % EVERY == 0:
                if death in BEHIND:
                    engine.saver.finish()  # so that what is counted is of the save at step 4
                if me == rank and engine.steps == 4 and death in {**SAVE_DEATHS, **BEHIND}:
                    {**SAVE_DEATHS, **BEHIND}[death]()
                if me == rank and engine.steps == EVERY and death.endswith(" s"):
                    threading.Timer(float(death.split()[0]), die).start()
                engine.save(path, asynchronous=asynchronous)
            if engine.steps == STEPS:
                break
    file_set.LEAST_BYTES = 64 * 2**20
    engine.close()
    if death.endswith(" s"):
        time.sleep(60.0)  # it comes
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
    at_call(1, engine.states, "finish")  # gradients are there, and partly on their way


def in_optimizer(engine: Engine) -> None:
    at_call(1, engine.states, "step", after=True)  # weights have changed, the scheduler and the counters have not


STEP_DEATHS: dict[str, Callable[[Engine], None]] = {
    "before the sum": in_backward,
    "after the optimizer": in_optimizer,
}
SAVE_DEATHS: dict[str, Callable[[], None]] = {
    "in a tensor": lambda: at_call(5, TensorWriter, "write"),
    "before a file is on the disk": lambda: at_call(1, TensorWriter, "close"),
    "before the folder is complete": lambda: at_call(1, checkpoint, "_finish"),
    "before it replaces the one before": lambda: at_call(1, writing, "replace_checkpoint"),
    "before it is called complete": lambda: at_call(1, Path, "rename"),
    "before its index is in place": lambda: at_call(1, Path, "replace"),
    "when its index is in place": lambda: at_call(1, Path, "replace", after=True),
    "between two files": lambda: at_call(2, Path, "replace", after=True),
    "before the rest is removed": lambda: at_call(2, replacement, "remove_unfinished"),
}
# Rank 0 alone does these.
ONLY_FIRST = tuple(SAVE_DEATHS)[2:]
BEHIND: dict[str, Callable[[], None]] = {
    "in a tensor, behind": lambda: at_call(5, TensorWriter, "add"),
    "before a file gets its name, behind": lambda: at_call(1, os, "rename"),
    "before the index, behind": lambda: at_call(1, saving, "write_shard_index"),
    "before its index is in place, behind": SAVE_DEATHS["before its index is in place"],
    "between two files, behind": SAVE_DEATHS["between two files"],
}
# The step that the last complete checkpoint is of, where it is another than 2.
RESUMES = {
    "when its index is in place": 4,
    "between two files": 4,
    "between two files, behind": 4,
    "before the rest is removed": 4,
    **dict.fromkeys(STEP_DEATHS, 4),
}
FEW = ("after the optimizer", "in a tensor", "between two files")
CASES: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "one": (1, {}, (*STEP_DEATHS, *SAVE_DEATHS)[::2]),
    "one, elsewhere": (1, {}, (*STEP_DEATHS, *SAVE_DEATHS)[1::2]),
    "one, zero": (1, dict(zero=dict(stage=3, placement="cpu")), FEW),
    "two": (2, dict(data=2), FEW),
    "two, zero": (2, dict(data=2, zero=dict(stage=3, placement="cpu")), ("before the sum", *FEW[1:])),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [case if case in ("one", "two") else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
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


def check_left(folder: Path, first: int) -> None:
    """That nothing is beside the checkpoint but, of a run that had nothing to save, what the one before was removing."""
    left = {path.name for path in folder.iterdir()}
    if first == STEPS:
        left -= {".ckpt.writing", ".ckpt.lock"}
    assert left == {"ckpt"}


def slowly(*arguments: Any) -> tuple[int, list[float]]:
    """A run on a disk that takes its time, so that saves reach into later steps."""
    original = TensorWriter.add

    def write(self: TensorWriter, name: str, tensor: Tensor) -> None:
        time.sleep(0.002)
        original(self, name, tensor)

    TensorWriter.add = write  # type: ignore[method-assign]
    try:
        return run(*arguments)
    finally:
        TensorWriter.add = original  # type: ignore[method-assign]


@pytest.mark.slow  # chosen moments, above, are those of each step of a save
@pytest.mark.parametrize("trials", [5, pytest.param(50, marks=pytest.mark.timeout(1800))])
def test_kills_at_random_moments_of_saves_in_the_background(trials: int, tmp_path: Path) -> None:
    """Any rank, at any moment from the first of three saves to after the last: the last complete one goes on, to the bit."""
    parallel = dict(data=2, zero=dict(stage=3, placement="cpu")) if trials > 5 else dict(data=2)
    unbroken = run_on_ranks(2, run, parallel, str(tmp_path / "unbroken" / "ckpt"))[0][1]
    dice, begun = random.Random(trials), []
    for trial in range(trials):
        folder = tmp_path / str(trial)
        death = f"{dice.uniform(0.0, 0.8):.4f} s"
        victim = dice.randrange(2)
        with pytest.raises(RankFailure, match="SIGKILL"):
            run_on_ranks(2, slowly, parallel, str(folder / "ckpt"), death, victim, True)
        if (folder / "ckpt").exists():
            Checkpoint(folder / "ckpt").verify()
        first, losses = run_on_ranks(2, run, parallel, str(folder / "ckpt"), "", 0, True)[0]
        assert losses == unbroken[first:], (trial, death, victim)
        check_left(folder, first)
        assert Checkpoint(folder / "ckpt").state["step"] == STEPS
        begun.append(first)
    assert {*begun} <= {0, 2, 4, 6}
    assert len({*begun}) > 1, begun  # some died early and some late


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "rest"])
def test_kills_at_chosen_moments_of_saves_in_the_background(rest: bool, tmp_path: Path) -> None:
    unbroken = run_on_ranks(2, run, dict(data=2), str(tmp_path / "unbroken" / "ckpt"))[0][1]
    for number, death in enumerate(BEHIND):
        if (number % 2 == 1) != rest:
            continue
        folder = tmp_path / death
        victim = 1 if number < 2 else 0  # the index and the folder are rank 0's
        with pytest.raises(RankFailure, match="SIGKILL"):
            run_on_ranks(2, run, dict(data=2), str(folder / "ckpt"), death, victim, True)
        first, losses = run_on_ranks(2, run, dict(data=2), str(folder / "ckpt"), "", 0, True)[0]
        assert first == RESUMES.get(death, 2), death
        assert losses == unbroken[first:], death
        assert [p.name for p in folder.iterdir()] == ["ckpt"], death
