"""Seconds of compute of a forward and a backward, without what was waited for; and a workload that takes so many."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from meshfold.zero_gemini.memory.copies import Waiting
from meshfold.zero_gemini.planner import Part, timed, typical_parts
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


def test_parts_lie_between_the_waits_that_units_begin_with() -> None:
    """Unit 2 waits for its parameters, unit 5 for the optimizer and then for them; in between a gradient waits for room."""
    waiting, clock, place = Waiting(), HandClock(), [0]
    phases = PhaseClock(waiting, clock, lambda: place[0])

    def wait(what: str, entered: int, seconds: float) -> None:
        place[0] = entered + 1
        with waiting(what):
            clock.now += seconds

    phases.begin()
    clock.now += 1
    wait("parameters", 2, 8)
    clock.now += 2
    phases.turn()
    place[0] = 5  # unit 4
    clock.now += 4
    wait("a gradient's buffer on the host", 4, 16)
    clock.now += 1
    wait("the optimizer's step", 5, 32)
    wait("parameters", 5, 64)
    clock.now += 3
    phases.end()
    found = phases.take()
    assert found is not None and (found.forward, found.backward) == (3, 8)
    assert [(part.phase, part.until, part.seconds) for part in found.parts] == [
        (0, 2, 1),
        (0, None, 2),
        (1, 5, 5),
        (1, 5, 0),
        (1, None, 3),
    ]


def test_a_workload_takes_the_seconds_of_its_parts() -> None:
    """Four layers of equal FLOP of which two were launched slowly: they take a tenth of what their trace says."""
    work = stack(machine=EMULATED, layers=4, layer_elems=1000, tokens=64, kept_bytes=10)
    work = replace(
        work,
        timestep_seconds=(1.0,) * 4 + (2.0,) * 4,
        layers=tuple(replace(layer, recompute_seconds=1.0) for layer in work.layers),
    )
    parts = [
        Part(phase=0, until=2, seconds=2.0),
        Part(phase=0, until=None, seconds=0.2),
        Part(phase=1, until=4, seconds=0.1),  # of nothing: counts to what follows
        Part(phase=1, until=6, seconds=0.4),  # layers 3 and 2, of which 3 is kept
        Part(phase=1, until=None, seconds=6.0),
    ]
    found, forward = timed(work, parts, kept=["layer3"]), sum(chunk.forward_seconds for chunk in work.chunks)
    assert found.timestep_seconds == pytest.approx((1.0, 1.0, 0.1, 0.1, 0.2, 0.2, 2.0, 2.0))
    assert [layer.recompute_seconds for layer in found.layers] == pytest.approx([1.0, 1.0, 0.1, 0.1])
    assert sum(chunk.forward_seconds for chunk in found.chunks) == pytest.approx(2.2 / 4 * forward)
    assert typical_parts([parts[:1], parts, parts]) == tuple(parts) and typical_parts([]) == ()
    slower = [replace(part, seconds=3 * part.seconds) for part in parts]
    assert typical_parts([parts, slower, slower])[0].seconds == 6.0
