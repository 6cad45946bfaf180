"""The simulator against by-hand numbers and against an oracle of longest paths."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import needs, random_schedule

from meshfold.pipeline import Costs, Schedule, ScheduleError, schedule, simulate
from meshfold.pipeline.scheduling.simulation import simulate_costs


def test_by_hand() -> None:
    made = Schedule.of(["0F0 0F1 0BW0 0BW1", "1F0 1B0 1F1 1W0 1BW1"])
    result = simulate(made, forward=[1, 2], backward_input=[2, 3], backward_weight=[1, 1], send=0.5)
    times = {str(one.action): (one.start, one.end) for timed in result.ranks for one in timed}
    assert times == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1.5, 3.5),
        "1B0": (3.5, 6.5),
        "1F1": (6.5, 8.5),
        "1W0": (8.5, 9.5),
        "1BW1": (9.5, 13.5),
        "0BW0": (7, 10),
        "0BW1": (14, 17),
    }
    assert (result.makespan, result.spans, result.busy) == (17, (17, 12), (8, 12))
    assert result.bubble == result.span_bubble == pytest.approx(1 - 20 / 34)
    assert result.peak == (2, 2)
    half = simulate(made, activation=[10, 4], kept=[1, 0.5])
    assert half.peak == (20, 4 - 2 + 4)
    lines = str(result).splitlines()
    assert lines[0] == (
        "custom: 17 with a barrier after the step, bubble 41.2%; 17 in the longest span of a rank, bubble 41.2%"
    )
    assert lines[2].split() == ["0", "0", "17", "8", "2"]


def test_both_readings_of_the_bubble_differ_where_ranks_pass_each_other() -> None:
    result = simulate(schedule("zb-h2", ranks=4, microbatches=8))
    assert (result.makespan, result.longest_span) == (27, 24)
    assert result.span_bubble == 0
    assert result.bubble == pytest.approx(3 / 27)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_times_are_longest_paths(seed: int) -> None:
    made, r = random_schedule(seed), Random(seed)
    stages = made.stages
    costs = Costs(
        forward=[r.uniform(0, 2) for _ in range(stages)],
        backward_input=[r.uniform(0, 2) for _ in range(stages)],
        backward_weight=[r.uniform(0, 2) for _ in range(stages)],
        send=[r.uniform(0, 1) for _ in range(stages - 1)],
        backward=r.choice((None, 1.5)),
    )
    read = costs.for_stages(stages)
    result = simulate_costs(made, costs)
    times = {one.action: one for timed in result.ranks for one in timed}
    graph = needs(made)
    for actions in made.ranks:
        before = None
        for action in actions:
            ready = [times[before].end] if before else [0.0]
            for other in graph[action]:
                away = made.stage_ranks[other.stage] != made.stage_ranks[action.stage]
                ready.append(times[other].end + (read.send[min(other.stage, action.stage)] if away else 0.0))
            assert times[action].start == max(ready)
            assert times[action].end == times[action].start + read.durations[action.stage][action.op]
            before = action


def test_a_step_of_one_stage_has_no_bubble_and_no_message() -> None:
    result = simulate(Schedule.of(["0F0 0BW0"]), send=5)
    assert (result.makespan, result.bubble) == (3, 0)


def test_both_gradients_in_one_go_may_cost_less() -> None:
    made = schedule("1f1b", ranks=2, microbatches=2)
    assert simulate(made, backward=1.5).makespan == 3 * 2.5
    assert simulate(schedule("zb-h1", ranks=2, microbatches=2), backward=1.5).makespan == 2 * 3 + 1


def test_finer_cuts_keep_the_model() -> None:
    costs = Costs(forward=[2, 4], backward_input=3, backward_weight=1, send=0.1, activation=[1, 2], kept=[0.5, 1])
    fine = costs.finer(2)
    assert fine.stages == 4
    assert fine.forward == [1, 1, 2, 2]
    assert (fine.backward_input, fine.send, fine.kept) == (1.5, 0.1, [0.5, 0.5, 1, 1])
    with pytest.raises(ScheduleError, match="differs between stage borders"):
        Costs(send=[1, 2]).finer(2)


def test_costs_that_do_not_fit() -> None:
    made = schedule("1f1b", ranks=4, microbatches=2)
    with pytest.raises(ScheduleError, match="forward has 3 numbers and there are 4 stages"):
        simulate(made, forward=[1, 1, 1])
    with pytest.raises(ScheduleError, match="send has 4 numbers and there are 3 borders"):
        simulate(made, send=[1, 1, 1, 1])
    with pytest.raises(ScheduleError, match=r"backward_weight holds -1\.0.*not negative"):
        simulate(made, backward_weight=-1)
    with pytest.raises(ScheduleError, match=r"kept holds 1\.5.*from 0 to 1"):
        simulate(made, kept=1.5)
    with pytest.raises(ScheduleError, match="never ends: rank 0 at 0BW0, rank 1 at 1BW0"):
        simulate(Schedule.of(["0BW0 0F0", "1BW0 1F0"]))
