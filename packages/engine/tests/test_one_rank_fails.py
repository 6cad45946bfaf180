"""An error on one rank of an engine ends the step on all: with the rank, the stage, what it was doing, and the traceback."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.engine import Engine
from meshfold.mesh import CollectiveError
from meshfold.mesh.testing import close_pools, run_on_ranks
from meshfold.mesh.watchdog import diagnosis
from meshfold.models import GPT, GPTConfig

LIMIT_S = 300.0
"""What the others would wait without being told; far more than a test may take"""


class Trouble(Exception):
    """Of the tests."""


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=37, hidden=32, layers=4, heads=4, max_positions=16))


def wrong_labels(output: Any, batch: Any) -> Tensor:
    raise Trouble("the labels are wrong")


def wrong_block(*given: Any, **named: Any) -> Tensor:
    raise Trouble("the block is wrong")


def step_in_which_one_fails(parallel: dict[str, Any], victim: int, where: str) -> tuple[str, float]:
    """What a rank's second step ends with, and after how many seconds. The rank that fails lives on."""
    diagnosis._BEAT_S = 0.1  # of this pool's ranks, which end after the test
    healthy = True

    def loss_fn(output: Any, batch: Any) -> Tensor:
        return output.logits.float().square().mean() if healthy else wrong_labels(output, batch)

    engine = Engine(
        gpt,
        parallel,
        optimizer=dict(name="adamw", lr=1e-3),
        watchdog=LIMIT_S,
        loss_fn=loss_fn if where == "loss" else None,
    )
    batch = torch.zeros(4, 16, dtype=torch.int64)
    engine.train_step(batch)
    if engine.mesh.rank == victim:
        healthy = False
        if where == "block":
            next(module for name, module in engine.model.named_modules() if name.endswith("mlp")).forward = wrong_block
    began = time.monotonic()
    try:
        engine.train_step(batch)
    except (CollectiveError, Trouble) as error:
        notes = "; ".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error} [{notes}]", time.monotonic() - began
    return "no error", time.monotonic() - began


def pipeline(size: int, schedule: str = "1f1b") -> dict[str, Any]:
    return dict(pipeline=dict(size=size, microbatches=4, schedule=schedule))


CASES: dict[str, tuple[int, dict[str, Any], int, str, str]] = {
    "loss on the last of 2 stages": (2, pipeline(2), 1, "loss", "the forward of stage 1 on micro-batch 0 (1F0)"),
    "loss on the last of 4 stages": (4, pipeline(4), 3, "loss", "the forward of stage 3 on micro-batch 0 (3F0)"),
    "block of the first of 2 stages": (2, pipeline(2), 0, "block", "the forward of stage 0 on micro-batch 0 (0F0)"),
    "block of the first of 4 stages": (4, pipeline(4, "zb-h1"), 0, "block", "the forward of stage 0 on micro-batch 0"),
    "loss of one data rank": (2, dict(data=2), 1, "loss", ""),
    "block under ZeRO stage 3": (2, dict(data=2, zero=dict(stage=3)), 0, "block", ""),
}
SLOW = {"loss on the last of 2 stages", "block of the first of 4 stages", "loss of one data rank"}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_all_end_at_once_with_the_cause(name: str) -> None:
    size, parallel, victim, where, action = CASES[name]
    close_pools()  # ranks of other tests have had errors of their own
    try:
        found = run_on_ranks(size, step_in_which_one_fails, parallel, victim, where)
    finally:
        close_pools()  # its connections are broken now
    what = "the labels are wrong" if where == "loss" else "the block is wrong"
    for rank, (text, seconds) in enumerate(found):
        assert seconds < LIMIT_S / 2
        if action:
            assert action in text
        if rank == victim:
            assert text.startswith(f"Trouble: {what} [")
            continue
        assert text.startswith(f"CollectiveError: rank {victim} failed in step 2, so the others end: Trouble: {what}\n")
        assert f"On rank {victim}, at test_one_rank_fails.py:" in text
        assert f'raise Trouble("{what}")' in text
        assert f"(Rank {rank} was in " in text
