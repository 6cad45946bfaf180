"""Actions, schedules, messages and programs print as text and are read back."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import NAMED, named, random_schedule

from meshfold.mesh.errors import MeshfoldError
from meshfold.pipeline import (
    Action,
    Op,
    Program,
    Receive,
    ReduceGradients,
    Schedule,
    ScheduleError,
    Send,
    communicate,
    search,
)
from meshfold.pipeline.scheduling.communication import parse_step


def test_text_of_an_action() -> None:
    assert str(Action(Op.F, 2, 0)) == "2F0"
    assert Action.parse("12BW34") == Action(Op.BW, 12, 34)
    for text in ("F0", "2F", "2X0", "2f0", "2BWW0", "-1F0", "2F0 ", ""):
        with pytest.raises(ScheduleError, match="not an action"):
            Action.parse(text)


@settings(deadline=None)
@given(st.sampled_from(Op), st.integers(0, 999), st.integers(0, 9999))
def test_actions_round_trip(op: Op, stage: int, microbatch: int) -> None:
    action = Action(op, stage, microbatch)
    assert Action.parse(str(action)) == action


def test_text_of_steps() -> None:
    for step, text in (
        (Send("activation", 2, 0, 1), ">2F0@1"),
        (Send("gradient", 1, 7, 0), ">1B7@0"),
        (Receive("activation", 2, 0, 0), "<2F0@0"),
        (Receive("gradient", 1, 7, 3), "<1B7@3"),
        (ReduceGradients(5), "5R"),
        (Action(Op.W, 1, 2), "1W2"),
    ):
        assert str(step) == text
        assert parse_step(text) == step


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_schedules_and_programs_round_trip(seed: int) -> None:
    made = random_schedule(seed)
    assert Schedule.parse(str(made)) == made
    program = communicate(made)
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize(("name", "options"), NAMED)
def test_named_schedules_round_trip(name: str, options: dict[str, int]) -> None:
    made = named(name, 4, 6, options)
    assert Schedule.parse(str(made)) == made
    plain = "\n".join(str(made).splitlines()[1:])
    assert Schedule.parse(plain).ranks == made.ranks
    assert Schedule.parse(plain).stage_ranks == made.stage_ranks
    assert Schedule.parse(plain.replace("rank 0:", "")).microbatches == 6


def test_text_that_is_no_schedule() -> None:
    with pytest.raises(ScheduleError, match=r"'0F' is not an action.*as in '2F0'"):
        Schedule.parse("0F 0BW0")
    with pytest.raises(ScheduleError, match="says 2 ranks, and 1 lines follow"):
        Schedule.parse("x: 2 ranks, 1 micro-batch, stages on 0\nrank 0: 0F0 0BW0")
    with pytest.raises(ScheduleError, match="is where rank 0 should be"):
        Schedule.parse("rank 1: 0F0 0BW0")
    with pytest.raises(ScheduleError, match="stage 1 is on no rank, stage 2 is"):
        Schedule.of(["0F0 0BW0", "2F0 2BW0"])


def test_what_a_schedule_says_about_itself() -> None:
    made = Schedule.of(["0F0 3F0 3BW0 0BW0", "1F0 2F0 2BW0 1BW0", ""], name="v")
    assert (made.stages, made.chunks, made.stage_ranks, made.microbatches) == (4, 2, (0, 1, 1, 0), 1)
    assert [made.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 2), ()]
    assert issubclass(ScheduleError, MeshfoldError)


def test_import_is_light(torch_python: str) -> None:
    """What only pictures or other parts need is not imported for a schedule."""
    code = (
        "import sys, meshfold.mesh; before = set(sys.modules); import meshfold.pipeline, meshfold.pipeline.scheduling.search; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; print(*sorted(new & {'matplotlib', 'numba', "
        "'transformers', 'triton', 'scipy'}))"
    )
    done = subprocess.run([torch_python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_old_names_warn() -> None:
    made = Schedule.of(["0F0 0BW0"])
    options: Any = dict(name="old", microbatches=1, home=(0,), ranks=made.ranks)
    with pytest.warns(DeprecationWarning, match=r"Schedule\(home=...\) is now Schedule\(stage_ranks=...\)"):
        old = Schedule(**options)
    assert replace(old, name=made.name) == made
    unchecked: Any = old
    with pytest.warns(DeprecationWarning, match=r"Schedule\.home is now Schedule\.stage_ranks"):
        assert unchecked.home == (0,)
    settled: Any = dict(ranks=2, microbatches=2, chunks=1, effort=0, home=(0, 1))
    with pytest.warns(DeprecationWarning, match=r"search\(home=...\) is now search\(stage_ranks=...\)"):
        assert search(**settled).schedule.stage_ranks == (0, 1)
