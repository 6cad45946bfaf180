"""Gathering passes over what takes no time, reductions wait for nothing that has only begun, and questions are asked once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from meshfold.mesh import record
from meshfold.mesh.testing import ranks
from meshfold.zero_gemini import Gemini
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.gradient import ChunkGradient
from meshfold.zero_gemini.chunks.placement import EVERYTHING_ON_THE_DEVICE
from meshfold.zero_gemini.optimizer.kernel_runs import ChunkStep
from meshfold.zero_gemini.prefetch import light_ones, reach, reaches, ready_from, ready_in_time, timesteps_of

sys.path.append(str(Path(__file__).parent))
from training_cases import in_chunks

WIDTH, LAYERS = 24, 3


class Tower(nn.Module):
    """Blocks of three matrices, a norm that is light, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(self.norm(x)).square().mean()
        return loss


class Block(nn.Module):
    """Its gradients come all at once, as those of a compiled block do."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, 4 * WIDTH) * 0.01 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Together.apply(x, *self.matrices)
        return y


class Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *matrices):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, *matrices)
        return x + sum((x @ m) @ m.t() for m in matrices)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, *matrices = ctx.saved_tensors
        dx = dy + sum((dy @ m) @ m.t() for m in matrices)
        return dx, *(x.t() @ (dy @ m) + dy.t() @ (x @ m) for m in matrices)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 3))
def test_a_plan_counts_ahead_as_the_executor_does(light: list[bool], prefetch: int) -> None:
    lights = frozenset(i for i, is_light in enumerate(light) if is_light)
    for timestep in range(len(light)):
        before = [t for t in range(timestep) if timestep - t <= reach(light[t + 1 :], prefetch)]
        assert ready_from(timestep, lights, prefetch) == min(before, default=timestep)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=12), st.integers(0, 9))
def test_by_time_a_unit_is_gathered_as_long_before_as_it_takes(units: list[tuple[int, bool]], lead: int) -> None:
    seconds, lights = [float(spent) for spent, _ in units], frozenset(i for i, (_, light) in enumerate(units) if light)
    ready = ready_in_time(seconds, lead, light=lights, prefetch=1)
    for timestep, begin in enumerate(ready):
        by_count = ready_from(timestep, lights, 1)
        assert begin == by_count or sum(seconds[begin + 1 : timestep]) < lead
        assert begin <= by_count and (begin == 0 or sum(seconds[begin:timestep]) >= lead)
    for timestep, more in enumerate(reaches(ready, range(len(ready)))):
        assert {t for t, begin in enumerate(ready) if begin <= timestep} == {*range(timestep + more + 1)}
    assert ready_in_time(seconds, 0.0, light=lights, prefetch=1) == tuple(
        ready_from(t, lights, 1) for t in range(len(units))
    )


def test_a_block_that_is_kept_repeats_no_units() -> None:
    """Units of a traced step, whose blocks of two parts were recomputed, and of one that keeps the first block."""
    traced = ["a.0", "a.1", "b.0", "b.1", "b.1", "b.0", "b.1", "b.0", "a.1", "a.0", "a.1", "a.0"]
    kept = ["a.0", "a.1", "b.0", "b.1", "b.1", "b.0", "b.1", "b.0", "a.1", "a.0"]
    timesteps = timesteps_of(kept, traced)
    assert timesteps == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    ready = [max(0, t - 2) for t in range(12)]
    assert reaches(ready, timesteps) == (2,) * 8 + (1, 0)
    assert timesteps_of(traced, traced) == [*range(12)]
    assert timesteps_of(["b.0", "a.0", "b.1", "a.1", "a.1"], kept) is None


def test_a_norm_is_light_and_a_block_is_not() -> None:
    assert light_ones({"block": 6400, "norm": 99, "embedding": 100}) == {"norm"}
    assert reach([True, True, False, False], 1) == 3
    assert reach([False, True], 1) == 1
    assert reach([True, False], 0) == 0


def tower_in_chunks() -> tuple[Tower, Gemini]:
    """A chunk to each matrix."""
    torch.manual_seed(0)
    model = Tower()
    gemini = in_chunks(model, torch.float32, EVERYTHING_ON_THE_DEVICE, world=2, chunk_elems=4 * WIDTH * WIDTH)
    return model, gemini


def step(model: Tower, gemini: Gemini) -> None:
    gemini.begin(last=True)
    model(torch.ones(2, WIDTH)).backward()
    gemini.finish()
    gemini.step()


@ranks(2)
def test_the_unit_behind_a_light_one_is_gathered_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gemini = tower_in_chunks()
    step(model, gemini)
    gathered: list[str] = []
    original = Chunk.gather

    def gather(chunk: Chunk, *read: Any) -> None:
        if not chunk.is_gathered:
            gathered.append(chunk.spec.names[0])
        original(chunk, *read)

    inside: list[int] = []  # how many were gathered when the last block was left, and the norm
    for unit in (model.blocks[-1], model.norm):
        unit.register_forward_hook(lambda *_: inside.append(len(gathered)))
    monkeypatch.setattr(Chunk, "gather", gather)
    step(model, gemini)
    monkeypatch.undo()
    gemini.close()
    assert "head.weight" in gathered[: inside[0]]  # behind the last block, not behind the norm
    assert not gathered[inside[0] : inside[1]]


@ranks(2)
def test_first_units_are_gathered_while_the_others_are_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gemini = tower_in_chunks()
    events: list[tuple[str, str]] = []
    gather, step_chunk = Chunk.gather, ChunkStep.at_once

    def gathered(chunk: Chunk, *read: Any) -> None:
        if not chunk.is_gathered:
            events.append(("gather", chunk.spec.names[0]))
        gather(chunk, *read)

    def stepped(one: ChunkStep) -> None:
        events.append(("step", one.held.chunk.spec.names[0]))
        step_chunk(one)

    monkeypatch.setattr(Chunk, "gather", gathered)
    monkeypatch.setattr(ChunkStep, "at_once", stepped)
    gemini.begin(last=True)
    model(torch.ones(2, WIDTH)).backward()
    gemini.finish()
    events.clear()
    gemini.step()
    first = [f"blocks.{block}.matrices.{number}" for block in (0, 1) for number in range(3)]
    assert events[:12] == [(what, name) for name in first for what in ("step", "gather")]
    assert [what for what, _ in events[12:]] == ["step"] * (len(gemini.chunks) - 6)
    events.clear()
    step(model, gemini)
    assert events[0] == ("gather", "blocks.2.matrices.0")  # the next forward begins with what is there
    monkeypatch.undo()
    gemini.close()


@ranks(2)
def test_values_that_are_written_after_a_step_are_those_that_the_next_forward_reads() -> None:
    model, gemini = tower_in_chunks()
    for _ in range(2):
        step(model, gemini)
    weight = model.blocks[0].matrices[0]
    gemini.write(weight, torch.zeros(WIDTH, 4 * WIDTH))
    gemini.publish()
    read: list[float] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: read.append(float(weight.abs().max())))
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    gemini.close()
    assert read == [0.0]


@ranks(2)
def test_reductions_of_one_unit_do_not_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gemini = tower_in_chunks()
    step(model, gemini)
    events: list[tuple[str, str]] = []
    begin, end = ChunkGradient.reduce, ChunkGradient.collect

    def reduce(gradient: ChunkGradient, *args: object, **settings: object) -> None:
        begin(gradient, *args, **settings)  # type: ignore[arg-type]
        events.append(("begin", gradient.chunk.spec.names[0]))

    def collect(gradient: ChunkGradient) -> None:
        if gradient.is_pending:
            events.append(("end", gradient.chunk.spec.names[0]))
        end(gradient)

    monkeypatch.setattr(ChunkGradient, "reduce", reduce)
    monkeypatch.setattr(ChunkGradient, "collect", collect)
    step(model, gemini)
    monkeypatch.undo()
    gemini.close()
    for number in reversed(range(LAYERS)):
        mine = [i for i, (what, name) in enumerate(events) if what == "begin" and f"blocks.{number}." in name]
        assert len(mine) == 3
        ended = [name for what, name in events[mine[0] : mine[-1]] if what == "end"]
        assert not [name for name in ended if f"blocks.{number}." in name], events
        if number < LAYERS - 1:  # and what was begun a unit before is over by then
            late = [name for what, name in events[mine[-1] :] if what == "end" and f"blocks.{number + 1}." in name]
            assert not late, events


@ranks(2)
def test_who_was_used_is_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gemini = tower_in_chunks()
    gemini.begin(last=True)
    model(torch.ones(2, WIDTH)).backward()
    gemini.finish()
    with record() as log:
        gemini.step()
    gemini.close()
    questions = [entry for entry in log.entries if entry.kind == "all_reduce"]
    assert len(questions) == 1, questions
