"""Gathers of parameters under ``zero`` stage 3: every step of a run sends what its plan says, and the first begins the second's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from meshfold.engine import Engine
from meshfold.engine.zero.states import ZeroStates
from meshfold.mesh import ParallelSpec, record
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import build
from meshfold.planner import estimate, find_machine
from meshfold.zero_gemini.chunks import parameter_table

SIZES: dict[str, Any] = dict(hidden=64, layers=3, heads=4, vocab_size=96, max_positions=32)
SMALL = partial(build, "gpt-tiny", **SIZES)
ZERO3 = dict(data=2, zero=dict(stage=3, placement="cuda"))
MICRO_STEPS = 2


def planned_bytes() -> int:
    """Bytes that a rank sends in a step to gather parameters, by its plan."""
    found = estimate(
        SMALL,
        ParallelSpec.parse(ZERO3),
        batch_size=8 * MICRO_STEPS,
        seq_len=32,
        precision="fp32",
        accumulate=MICRO_STEPS,
        machine=find_machine("h200"),
    )
    return sum(sent.bytes for sent in found.traffic if sent.kind == "all_gather" and sent.phase == "parameters")


def sent_bytes(steps: int, clip: float | None) -> list[tuple[int, int]]:
    """Of each step of a run: bytes that are sent to gather parameters, and those of them that the next step begins with."""
    found = []
    with Engine(
        SMALL, ZERO3, optimizer="adamw", precision="fp32", gradient_accumulation=MICRO_STEPS, clip_grad_norm=clip
    ) as engine:
        assert isinstance(engine.states, ZeroStates)
        for step in range(steps):
            with record() as log:
                for micro in range(MICRO_STEPS):
                    ids = torch.randint(96, (8, 32), generator=torch.Generator().manual_seed(10 * step + micro))
                    engine.train_step(engine.shard_batch(ids))
            ahead = [chunk for chunk in engine.states.gemini.chunks if chunk.is_gathered]
            found.append(
                (
                    sum(int(each.bytes) for each in log.entries if each.kind == "all_gather" and each.bytes > 1000),
                    sum(chunk.gathered_bytes // 2 for chunk in ahead),  # half of a chunk is a rank's own
                )
            )
    return found


def runs(leasts: tuple[int, ...], clips: tuple[float | None, ...]) -> list[list[tuple[int, int]]]:
    found = []
    for least in leasts:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parameter_table, "LEAST_ELEMS", least)
            found += [sent_bytes(3, clip) for clip in clips]
    return found


def test_every_step_gathers_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the norm is waited for, a step ends with the gathers that the next one begins with: a first step sends these too."""
    leasts, clips = (2**11, parameter_table.LEAST_ELEMS), (None, 1.0)
    planned = []
    for least in leasts:
        monkeypatch.setattr(parameter_table, "LEAST_ELEMS", least)
        planned += [planned_bytes()] * len(clips)
    assert planned[0] > planned[-1]  # of several chunks, those of the forward are gathered again for the backward
    for found in run_on_ranks(2, runs, leasts, clips):
        for steps, bytes_, clip in zip(found, planned, clips * len(leasts), strict=True):
            before = 0
            for sent, ahead in steps:
                assert sent - ahead + before == bytes_, (steps, clip)
                assert (ahead > 0) == (clip is not None)
                before = ahead
