"""Seconds of compute of a forward and a backward, without what was waited for; and a workload that takes so many."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from meshfold.zero_gemini.memory.copies import Waiting
from meshfold.zero_gemini.profiler import PhaseClock, PhaseSeconds

sys.path.append(str(Path(__file__).parent))
from hand_clock import HandClock
from planner_cases import EMULATED, stack


def waited(waiting: Waiting, clock: HandClock, seconds: float) -> None:
    with waiting("something"):
        clock.now += seconds


def test_what_is_waited_for_is_no_compute_of_its_phase() -> None:
    waiting, clock = Waiting(), HandClock()
    phases = PhaseClock(waiting, clock)
    waited(waiting, clock, 64)  # before it begins
    phases.begin()
    clock.now += 1
    waited(waiting, clock, 8)
    clock.now += 2
    phases.turn()
    clock.now += 4
    waited(waiting, clock, 16)
    waited(waiting, clock, 32)
    phases.turn()  # another backward of the same micro-step
    clock.now += 1
    phases.end()
    waited(waiting, clock, 64)
    assert not waiting.is_watched
    assert phases.take() == PhaseSeconds(forward=3, backward=5)
    assert phases.take() is None


def test_a_step_that_was_left_in_the_middle_says_nothing() -> None:
    waiting, clock = Waiting(), HandClock()
    phases = PhaseClock(waiting, clock)
    phases.begin()
    phases.turn()
    phases.stop()
    assert not waiting.is_watched and phases.take() is None
    phases.end()  # nothing was begun since
    assert phases.take() is None


def test_another_watch_is_left_alone() -> None:
    def other(what: str) -> AbstractContextManager[None]:
        return nullcontext()

    waiting = Waiting()
    phases = PhaseClock(waiting, HandClock())
    with waiting.watched(other):
        phases.stop()
        assert waiting.is_watched
        with pytest.raises(RuntimeError, match="another watch of waits is active"):
            phases.begin()
    assert not waiting.is_watched


def test_a_workload_takes_as_long_as_was_seen() -> None:
    work = stack(machine=EMULATED, layers=4, layer_elems=1000, tokens=64, kept_bytes=10)
    kept = ("layer1", "layer3")
    found = work.taking(forward=3.0, backward=5.0, kept=kept)
    assert sum(chunk.forward_seconds for chunk in found.chunks) == pytest.approx(3.0)
    again = sum(layer.recompute_seconds for layer in found.layers if layer.name not in kept)
    assert sum(chunk.backward_seconds for chunk in found.chunks) + again == pytest.approx(5.0)
    # In proportion: two of four layers recompute for half of what a backward takes by itself.
    assert [layer.recompute_seconds for layer in found.layers] == pytest.approx([0.5] * 4)
    assert [chunk.backward_seconds for chunk in found.chunks] == pytest.approx([1.0] * 4)
    assert found.non_model_bytes == work.non_model_bytes


def test_a_phase_without_compute_stays_without() -> None:
    work = stack(machine=EMULATED, layers=2, layer_elems=1000, tokens=64).taking(forward=0, backward=1, kept=())
    again = work.taking(forward=2.0, backward=2.0, kept=())
    assert [chunk.forward_seconds for chunk in again.chunks] == [0.0, 0.0]
