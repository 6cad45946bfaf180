"""Legal walks never raise, illegal steps always do and change nothing, counts are right at all times."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file

from parameter_states import TRANSITIONS, State, Tracker

from meshfold.zero_gemini.errors import ChunkError

FREE, HOLD, COMPUTE = State.FREE, State.HOLD, State.COMPUTE
AFTER_FWD, AFTER_BWD, READY = State.HOLD_AFTER_FWD, State.HOLD_AFTER_BWD, State.READY_FOR_REDUCE


def check_counts(tracker, expected):
    for state in State:
        assert tracker.count(state) == list(expected.values()).count(state)
        assert tracker.any_in(state) == (state in expected.values())
        assert tracker.all_in(state) == (set(expected.values()) == {state})
        assert tracker.names_in(state) == [name for name, s in expected.items() if s is state]
    assert tracker.all_in(*State)
    for name, state in expected.items():
        assert tracker.state(name) is state
        assert (tracker.uses(name) > 0) == (state is COMPUTE)


@given(data=st.data(), count=st.integers(1, 4), frozen=st.booleans())
def test_random_walks(data, count, frozen):
    names = [f"p{i}" for i in range(count)]
    tracker = Tracker(names, frozen=frozen)
    expected = dict.fromkeys(names, FREE)
    for _ in range(data.draw(st.integers(0, 40))):
        name = data.draw(st.sampled_from(names))
        to = data.draw(st.sampled_from(State))
        legal = to in TRANSITIONS[expected[name]] and not (frozen and to is READY)
        assert tracker.legal(name, to) == legal
        if legal:
            tracker.move(name, to, "a legal walk")
            expected[name] = to
        else:
            with pytest.raises(ChunkError) as caught:
                tracker.move(name, to, "an operation")
            for word in (name, expected[name].name, to.name, "an operation"):
                assert word in str(caught.value)
        check_counts(tracker, expected)


@given(data=st.data())
def test_nested_uses_leave_compute_at_the_last_end(data):
    tracker = Tracker(["w", "v"], state=HOLD)
    open_uses = 0
    for _ in range(data.draw(st.integers(1, 30))):
        if data.draw(st.booleans()):
            assert tracker.begin("w", "forward") == (open_uses == 0)
            open_uses += 1
        elif open_uses:
            assert tracker.end("w", AFTER_BWD, "backward") == (open_uses == 1)
            open_uses -= 1
            if not open_uses:
                assert tracker.state("w") is AFTER_BWD
        else:
            with pytest.raises(ChunkError, match="backward: parameter 'w'"):
                tracker.end("w", AFTER_BWD, "backward")
        assert tracker.uses("w") == open_uses
        assert tracker.any_in(COMPUTE) == (open_uses > 0)
        assert tracker.state("v") is HOLD


def test_every_pair_is_either_legal_or_raises():
    paths = {FREE: [], HOLD: [HOLD], COMPUTE: [HOLD, COMPUTE], AFTER_FWD: [HOLD, COMPUTE, AFTER_FWD]}
    paths[AFTER_BWD] = [HOLD, COMPUTE, AFTER_BWD]
    paths[READY] = [HOLD, READY]
    for start, to in itertools.product(State, State):
        tracker = Tracker(["w"])
        for state in paths[start]:
            tracker.move("w", state, "setup")
        if to in TRANSITIONS[start]:
            tracker.move("w", to, "test")
            assert tracker.state("w") is to
        else:
            with pytest.raises(ChunkError, match=f"cannot go from {start.name} to {to.name}"):
                tracker.move("w", to, "test")
            assert tracker.state("w") is start


WALKS = {
    "training": [COMPUTE, AFTER_FWD, COMPUTE, AFTER_BWD, READY, HOLD],
    "activation checkpoint": [COMPUTE, AFTER_FWD, COMPUTE, AFTER_FWD, COMPUTE, AFTER_BWD, READY, HOLD],
    "tied, twice in forward": [
        COMPUTE,
        AFTER_FWD,
        COMPUTE,
        AFTER_FWD,
        COMPUTE,
        AFTER_BWD,
        COMPUTE,
        AFTER_BWD,
        READY,
        HOLD,
    ],
    "tied, second use is recomputed": [
        COMPUTE,
        AFTER_FWD,
        COMPUTE,
        AFTER_BWD,
        COMPUTE,
        AFTER_FWD,
        COMPUTE,
        AFTER_BWD,
        READY,
        HOLD,
    ],
    "evaluation": [COMPUTE, HOLD],
    "unused": [READY, HOLD],
    "its output leads nowhere": [COMPUTE, AFTER_FWD, READY, HOLD],
    "embedding: the gradient needs no values": [COMPUTE, AFTER_FWD, READY, HOLD],
    "gradient before the backward hook": [COMPUTE, AFTER_FWD, COMPUTE, READY, HOLD],
    "second backward over the same graph": [
        COMPUTE,
        AFTER_FWD,
        COMPUTE,
        AFTER_BWD,
        READY,
        HOLD,
        COMPUTE,
        AFTER_BWD,
        READY,
        HOLD,
    ],
    "second loss before the chunk was reduced": [COMPUTE, AFTER_FWD, COMPUTE, AFTER_BWD, READY, COMPUTE, READY, HOLD],
    "more gradient without another use": [COMPUTE, AFTER_FWD, READY, READY, HOLD],
    "frozen": [COMPUTE, AFTER_FWD, COMPUTE, AFTER_BWD, HOLD],
    "frozen, no backward needed": [COMPUTE, AFTER_FWD, HOLD],
    "abandoned": [COMPUTE, AFTER_FWD, HOLD, COMPUTE, HOLD],
}


@pytest.mark.parametrize("name", WALKS)
def test_the_walks_that_training_takes(name):
    tracker = Tracker(["w"], frozen=name.startswith("frozen"))
    tracker.move("w", HOLD, "materialise")
    for state in WALKS[name]:
        tracker.move("w", state, name)
    assert tracker.all_in(HOLD)


def test_recomputation_inside_a_backward_does_not_release():
    tracker = Tracker(["w"], state=HOLD)
    tracker.begin("w", "forward")
    tracker.end("w", AFTER_FWD, "forward")
    tracker.begin("w", "backward")
    tracker.begin("w", "recomputation")
    assert not tracker.end("w", AFTER_FWD, "recomputation")
    assert tracker.state("w") is COMPUTE
    assert tracker.end("w", AFTER_BWD, "backward")
    tracker.move("w", READY, "gradient")


def test_a_gradient_closes_all_uses():
    tracker = Tracker(["w"], state=HOLD)
    tracker.begin("w", "one branch")
    tracker.begin("w", "another branch")
    tracker.move("w", READY, "gradient")
    assert tracker.uses("w") == 0
    with pytest.raises(ChunkError, match="from READY_FOR_REDUCE to HOLD_AFTER_BWD"):
        tracker.end("w", AFTER_BWD, "late hook")


def test_frozen_is_never_reduced():
    tracker = Tracker(["w"], state=HOLD, frozen=True, chunk="chunk 7")
    with pytest.raises(
        ChunkError,
        match=r"end of backward: parameter 'w' of chunk 7 .*frozen.*From HOLD it can go to COMPUTE$",
    ):
        tracker.move("w", READY, "end of backward")


def test_move_all_is_all_or_nothing():
    tracker = Tracker(["a", "b", "c"], state=HOLD)
    tracker.begin("c", "forward")
    with pytest.raises(ChunkError, match=r"'c'.*from COMPUTE to COMPUTE"):
        tracker.move_all(COMPUTE, "gather")
    assert tracker.names_in(HOLD) == ["a", "b"]
    tracker.move_all(READY, "end of backward")
    assert tracker.all_in(READY)
    tracker.move_all(HOLD, "reduce")
    assert tracker.all_in(HOLD)


def test_reset_after_an_abandoned_iteration():
    tracker = Tracker(["a", "b", "c", "d"])
    for name, walk in {"a": [HOLD], "b": [HOLD, COMPUTE], "c": [HOLD, COMPUTE, AFTER_FWD]}.items():
        for state in walk:
            tracker.move(name, state, "setup")
    tracker.begin("b", "nested")
    tracker.reset("an exception in forward")
    assert tracker.names_in(HOLD) == ["a", "b", "c"]
    assert tracker.names_in(FREE) == ["d"]
    assert tracker.uses("b") == 0
    assert repr(tracker) == "Tracker(a chunk: FREE 1, HOLD 3)"
    assert len(tracker) == 4


def test_what_a_tracker_cannot_be_built_of():
    with pytest.raises(ChunkError, match="no parameters"):
        Tracker([])
    with pytest.raises(ChunkError, match="'b' is given twice"):
        Tracker(["a", "b", "b"])
    with pytest.raises(ChunkError, match="cannot start in COMPUTE"):
        Tracker(["a"], state=COMPUTE)
    with pytest.raises(ChunkError, match=r"has no parameter 'weigth'\. Did you mean 'weight'"):
        Tracker(["weight"]).move("weigth", HOLD, "test")
