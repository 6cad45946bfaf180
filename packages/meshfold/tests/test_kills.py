"""A rank that is killed at a random moment, stopped, or asked to end: no hang, nothing lost, and a message that says why."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.engine import Checkpoint, Engine
from meshfold.engine.long_runs.stopping import GracefulStop
from meshfold.mesh.testing import RankFailure, ranks, run_on_ranks
from meshfold.mesh.watchdog import monitor
from meshfold.models import GPT, GPTConfig

STEPS = 16
LIMIT_S = 4.0
PATIENCE_S = 300.0  # of a machine that does other things too
SPECS: dict[str, dict[str, Any]] = {
    "tensor": dict(data=2, tensor=2),
    "zero": dict(data=4, zero=dict(stage=3)),
    "pipeline": dict(pipeline=dict(size=2, microbatches=2), tensor=2),
}


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=37, hidden=32, layers=2, heads=4, max_positions=16, dropout=0.1))


def rows(step: int) -> torch.Tensor:
    return torch.randint(37, (8, 8), generator=torch.Generator().manual_seed(step))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(parallel: dict[str, Any], path: str, victim: int = -1, seconds: float = 0.0) -> tuple[int, list[float], float]:
    """Train to the last step from the last checkpoint, saving after every step, unless a rank is killed on the way.

    Returns:
        The first step, the losses from there on, and the seconds that it took.
    """
    began = time.monotonic()
    engine = Engine(gpt, parallel, optimizer=dict(name="adamw", lr=1e-2), watchdog=20.0)
    if Path(path).exists():
        engine.load(path)
    first, losses = engine.steps, []
    death = threading.Timer(seconds, die)
    if engine.mesh.rank == victim:
        death.start()
    while engine.steps < STEPS:
        losses.append(engine.train_step(engine.shard_batch(rows(engine.steps))))
        engine.save(path)
    death.cancel()
    engine.close()
    return first, losses, time.monotonic() - began


def killed_often(name: str, kills: int, seed: int, folder: Path) -> None:
    """One run that is killed so often, and goes on each time; then the rest. Each time it must end by itself, at once."""
    parallel = SPECS[name]
    whole = run_on_ranks(4, run, parallel, str(folder / "whole" / "ckpt"), timeout_s=PATIENCE_S)[0]
    chance = random.Random(seed)
    path = str(folder / "ckpt")
    done = 0
    said: list[tuple[int, str]] = []
    while done < kills:
        victim, moment = chance.randrange(4), chance.uniform(0.0, whole[2] / 2)
        try:
            first, losses, _ = run_on_ranks(4, run, parallel, path, victim, moment, timeout_s=PATIENCE_S)[0]
        except RankFailure as failure:
            said.append((victim, str(failure)))
            done += 1
        else:  # it came to the end first: what is there must be right, and the next begins anew
            assert losses == whole[1][first:]
            for part in Path(path).parent.glob("*ckpt*"):
                part.rename(part.with_name(f"{part.name.strip('.')}-of-{done}-{chance.random()}"))
    first, losses, _ = run_on_ranks(4, run, parallel, path, timeout_s=PATIENCE_S)[0]
    assert losses == whole[1][first:]
    Checkpoint(path).verify()
    left = {part.name for part in folder.glob(".ckpt*")}
    # The last save of the last one that was killed was complete: then nothing was saved since, which would remove the rest.
    assert left <= ({".ckpt.writing", ".ckpt.lock"} if first == STEPS else set())
    for victim, text in said:
        assert f"rank {victim} of 4 failed in run: the process was killed by SIGKILL" in text


@pytest.mark.slow  # one kill of a whole job: integration_tests/test_kills_of_jobs.py
@pytest.mark.parametrize("seed", [1])
def test_two_kills(seed: int, tmp_path: Path) -> None:
    killed_often("tensor", 2, seed, tmp_path)


@pytest.mark.slow  # minutes: the same, much more often and under other specs
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "kills"), [("tensor", 20), ("zero", 20), ("pipeline", 20)])
def test_sixty_kills(name: str, kills: int, tmp_path: Path) -> None:
    killed_often(name, kills, 7, tmp_path)


def stopped_in_the_middle(victim: int) -> None:
    engine = Engine(gpt, dict(data=2, tensor=2), optimizer=dict(name="adamw", lr=1e-2), watchdog=PATIENCE_S)
    for step in range(4):
        engine.train_step(engine.shard_batch(rows(step)))
    monitor.watch(LIMIT_S)  # after the first steps, which take long on a busy machine
    monitor._running[1]._diagnosis.publish()  # type: ignore[index]  # so that the others know how far this one had come
    if engine.mesh.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    engine.train_step(engine.shard_batch(rows(4)))


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_rank_that_is_stopped_is_named(victim: int) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(4, stopped_in_the_middle, victim, timeout_s=100)
    text = str(caught.value)
    assert "in step 5" in text and "did not finish in 4 s" in text, text
    if victim:
        line = next(line for line in text.splitlines() if line.strip().startswith(f"rank {victim}: process "))
        assert "is stopped (by SIGSTOP or a debugger)" in line and "in step 4" in line
    else:  # here rank 0 serves the store
        assert "the store in which they met does not answer" in text
    assert time.monotonic() - began < 90


def asked_to_stop(victim: int, folder: str) -> tuple[int, list[float]]:
    engine = Engine(gpt, dict(data=2, tensor=2), optimizer=dict(name="adamw", lr=1e-2))
    losses = []
    with GracefulStop(engine) as stop:
        for step in range(20):
            if step == 4 and engine.mesh.rank == victim:
                os.kill(os.getpid(), signal.SIGTERM)
            losses.append(engine.train_step(engine.shard_batch(rows(step))))
            if stop.now():
                engine.save(folder)
                break
    assert (signal.getsignal(signal.SIGTERM), stop.asked) == (signal.SIG_DFL, engine.mesh.rank == victim)
    steps = engine.steps
    engine.close()
    again = Engine(gpt, dict(data=4), optimizer=dict(name="adamw", lr=1e-2))
    again.load(folder)
    losses.append(again.train_step(again.shard_batch(rows(steps))))
    again.close()
    return steps, losses


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_all_ranks_stop_after_the_same_step(victim: int, tmp_path: Path) -> None:
    """Whichever is asked: also one that has no data group in common with another."""
    found = run_on_ranks(4, asked_to_stop, victim, str(tmp_path / "ckpt"))
    assert len({steps for steps, _ in found}) == 1
    steps, losses = found[0]
    assert steps == 6  # asked in step 5, told to all during step 6
    assert len(losses) == 7


@ranks(1)
def test_a_process_alone_stops_at_once() -> None:
    engine = Engine(gpt, optimizer=dict(name="adamw", lr=1e-2))
    with GracefulStop(engine) as stop:
        assert not stop.now()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.now()
