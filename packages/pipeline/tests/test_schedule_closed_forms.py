"""Every named schedule: valid for any count of micro-batches, and as fast and as lean as its paper says.

The bubbles are those of arXiv 2401.10241, Table 2, idle time = cost - m (TF + TB + TW), for TW <= TF <= TB as in its Table 1;
of arXiv 2104.04473 for interleaved; of arXiv 2308.15762 for Hanayo.
"""

from __future__ import annotations

import pytest
from schedule_cases import NAMED, is_valid, named, some_counts

from meshfold.pipeline import Op, check, schedule, simulate

RANKS = (2, 4, 8)
TIMES = ((1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (0.5, 2.0, 0.5), (1.0, 1.0, 0.125))
UNIT = (1.0, 1.0, 1.0)

each_size = pytest.mark.parametrize("ranks", RANKS)


@pytest.mark.parametrize(("ranks", "every"), [(2, 1), (4, 1), (8, 3), pytest.param(8, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "options"), NAMED)
def test_every_count_of_micro_batches_works(name: str, options: dict[str, int], ranks: int, every: int) -> None:
    for m in some_counts(ranks)[::every]:
        made = named(name, ranks, m, options)
        assert is_valid(made), m
        check(made)
        assert made.stages == ranks * made.chunks
        assert made.name == name
        # less work is never slower, and never holds more than there is
        result = simulate(made)
        assert max(result.peak_microbatches) <= m * made.chunks
        assert sum(result.busy) == 3 * m * made.stages


@pytest.mark.parametrize(("name", "options"), NAMED)
def test_one_rank(name: str, options: dict[str, int]) -> None:
    made = named(name, 1, 3, options)
    assert is_valid(made)
    assert simulate(made).bubble == 0


@each_size
@pytest.mark.parametrize("times", TIMES)
def test_gpipe_and_1f1b(ranks: int, times: tuple[float, float, float]) -> None:
    f, b, w = times
    for m in some_counts(ranks):
        for name in ("gpipe", "1f1b"):
            result = simulate(schedule(name, ranks=ranks, microbatches=m), f, b, w)
            assert result.makespan == pytest.approx((m + ranks - 1) * (f + b + w))
            assert result.longest_span == pytest.approx(result.makespan)
            assert result.bubble == pytest.approx((ranks - 1) / (m + ranks - 1))
            assert result.span_bubble == pytest.approx(result.bubble)
            held = [m if name == "gpipe" else min(m, ranks - rank) for rank in range(ranks)]
            assert list(result.peak_microbatches) == held


@each_size
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_zb_h1_and_h2(ranks: int, times: tuple[float, float, float], kept: float) -> None:
    f, b, w = times
    for steps, name in enumerate(("zb-h1", "zb-h2"), start=1):
        most = steps * (ranks - 1) + 1  # in flight on every rank: p and 2 p - 1
        for m in some_counts(ranks):
            result = simulate(schedule(name, ranks=ranks, microbatches=m), f, b, w, kept=kept)
            # (p - 1)(TF + TB - steps TW); where the step has fewer micro-batches, fewer W are there to fill it
            idle = (ranks - 1) * (f + b) - (min(m, most) - 1) * w
            if idle >= 0:
                assert result.longest_span == pytest.approx(m * (f + b + w) + idle)
            if m >= most:
                last = (ranks - 1) * f  # when the last rank begins, which then has no gap
                assert result.makespan == pytest.approx(m * (f + b + w) + max(idle, last if steps == 2 else 0))
                held = [(most - steps * rank) + kept * steps * rank for rank in range(ranks)]
                assert result.peak == pytest.approx(held)
            assert list(result.peak_microbatches) == [min(m, most)] * ranks


@each_size
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_interleaved(ranks: int, times: tuple[float, float, float], chunks: int) -> None:
    each = sum(times)
    for m in (ranks, 2 * ranks, 3 * ranks):
        result = simulate(schedule("interleaved", ranks=ranks, microbatches=m, chunks=chunks), *times)
        assert result.makespan == pytest.approx((m * chunks + ranks - 1) * each)
        assert result.longest_span == pytest.approx(result.makespan)
        if m > ranks and chunks > 1:
            assert max(result.peak_microbatches) == ranks * chunks + ranks - 1
    ragged = simulate(schedule("interleaved", ranks=ranks, microbatches=ranks + 1, chunks=chunks), *times)
    assert ragged.makespan <= (2 * ranks * chunks + ranks - 1) * each


@each_size
def test_zb_v(ranks: int) -> None:
    for m in some_counts(ranks):
        result = simulate(schedule("zb-v", ranks=ranks, microbatches=m))
        missing = max(2 * ranks - 1 - m, 0)  # so many micro-batches fewer than fill the pipeline
        assert result.longest_span == 6 * m + 2 * missing
        if not missing:
            assert result.span_bubble == 0
            assert result.makespan == 6 * m + ranks - 1
            assert result.peak_microbatches == (2 * ranks,) * ranks
        assert max(result.peak_microbatches) <= 2 * ranks
    # as cheap in memory as 1F1B in units of a rank's share of the model, and faster
    v = simulate(schedule("zb-v", ranks=ranks, microbatches=3 * ranks), 0.5, 0.5, 0.5, activation=0.5)
    plain = simulate(schedule("1f1b", ranks=ranks, microbatches=3 * ranks))
    assert max(v.peak) == max(plain.peak)
    assert v.makespan < plain.makespan


@each_size
def test_dualpipe_v(ranks: int) -> None:
    for m in (2 * ranks, 2 * ranks + 3, 4 * ranks):
        result = simulate(schedule("dualpipe-v", ranks=ranks, microbatches=m))
        assert result.makespan == result.longest_span == 6 * m + ranks - 1
        assert result.peak_microbatches == (2 * ranks + 1,) * ranks
    ops = {
        action.op for actions in schedule("dualpipe-v", ranks=ranks, microbatches=2 * ranks).ranks for action in actions
    }
    assert ops == set(Op)


@each_size
@pytest.mark.parametrize("waves", [1, 2, 4])
def test_hanayo(ranks: int, waves: int) -> None:
    """At m = p and TB + TW = 2 TF at most the paper's share, to 0.002 (its formula gives no whole numbers of steps)."""
    result = simulate(schedule("hanayo", ranks=ranks, microbatches=ranks, waves=waves))
    formula = (2 * ranks - 2) / (3 * ranks * waves + ranks - 1)
    assert result.bubble <= formula + 0.002
    assert result.bubble > 0.75 * formula
    assert result.bubble < (ranks - 1) / (2 * ranks - 1)  # 1F1B's
    for m in (ranks + 1, 2 * ranks, 4 * ranks):
        result = simulate(schedule("hanayo", ranks=ranks, microbatches=m, waves=waves))
        assert max(result.peak_microbatches) <= 2 * ranks * waves + ranks - 1
        assert result.bubble < (ranks - 1) / (m + ranks - 1)


def test_waves_lie_as_waves() -> None:
    assert schedule("hanayo", ranks=3, microbatches=2, waves=2).stage_ranks == (0, 1, 2, 2, 1, 0) * 2
    assert schedule("zb-v", ranks=3, microbatches=2).stage_ranks == (0, 1, 2, 2, 1, 0)
    assert schedule("interleaved", ranks=3, microbatches=2).stage_ranks == (0, 1, 2) * 2


@pytest.mark.parametrize(("name", "options"), NAMED)
def test_gradients_are_summed_in_one_order(name: str, options: dict[str, int]) -> None:
    """Weight gradients of every stage run from micro-batch 0 up, as in 1F1B: sums are equal to the bit."""
    for m in (3, 8, 13):
        made = named(name, 4, m, options)
        for rank, actions in enumerate(made.ranks):
            for stage in made.stages_of(rank):
                order = [a.microbatch for a in actions if a.stage == stage and a.finishes_weights]
                assert order == list(range(m)), (m, stage)
