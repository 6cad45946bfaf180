"""Growth curves: traffic equals formulas, ways end where they have nothing left to split, the page is what the curves say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.growth.curves import RANKS, WAYS, Point, Work, grid_of, point, strong, weak
from benchmarks.growth.run import described, fastest, main
from meshfold.planner import find_machine

MACHINE = find_machine("h100x8")
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
KNOWN: dict[str, Any] = json.loads((RESULTS / "growth.json").read_text())


def at(way: str, ranks: int, work: Work) -> Point:
    found = point(way, ranks, work, MACHINE)
    assert found is not None
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [4, 64])
def test_traffic_is_that_of_the_formulas(ranks: int) -> None:
    """1D sums the stream twice in each of a forward, its repetition and a backward; 2D's falls with the side of its square."""
    work = strong(ranks)
    share, weights = (ranks - 1) / ranks, work.parameters * work.size.itemsize
    assert at("1d", ranks, work).sent == pytest.approx(work.layers * 6 * 2 * share * work.size.stream, rel=1e-3)
    assert at("data", ranks, work).sent == pytest.approx(2 * share * weights)
    assert at("zero-3", ranks, work).sent == pytest.approx(3 * share * weights)
    side = ranks**0.5
    assert at("2d", ranks, work).sent / at("2d", 4, strong(4)).sent == pytest.approx(
        (side - 1) / side**2 / (1 / 4), rel=0.01
    )


def test_models_and_grids_grow_with_the_ranks() -> None:
    assert [round(weak(ranks).parameters / 1e9) for ranks in RANKS] == [1, 4, 16, 64, 258, 1031]
    assert len({strong(ranks) for ranks in RANKS}) == 1
    for ranks in RANKS:
        assert all(grid_of(way, ranks).ranks == ranks for way in ("1d", "2d", "2.5d", "3d"))
    assert grid_of("3d", 1024).sizes == (16, 8, 8)


def test_a_way_ends_where_it_has_fewer_to_split_than_ranks() -> None:
    ends = {"1d": 256, "data": 4096, "ring": 1024, "pipeline": 64}  # 128 heads, 1,024 rows, 512 tokens, 32 layers
    for way, ranks in ends.items():
        assert point(way, ranks, strong(ranks), MACHINE) is None
    assert point("2d", 4096, strong(4096), MACHINE) is not None


def test_more_ranks_are_never_slower_under_strong_scaling_by_2d_and_memory_falls() -> None:
    two, four = at("2d", 4, strong(4)), at("2d", 64, strong(64))
    assert two.seconds > four.seconds and two.held > four.held and two.efficiency > four.efficiency


def test_the_committed_curves_are_those_of_today() -> None:
    for one in KNOWN["points"]:
        if one["ranks"] == 16:
            found = at(one["way"], 16, {"strong": strong, "weak": weak}[one["kind"]](16))
            assert one["seconds"] == pytest.approx(found.seconds, rel=0.02), "run meshfold bench growth again"
            assert (one["sent"], one["held"]) == (
                pytest.approx(found.sent, rel=0.02),
                pytest.approx(found.held, rel=0.02),
            )


def test_the_page_is_made_of_the_curves_and_says_who_wins(tmp_path: Path) -> None:
    assert (RESULTS / "growth.md").read_text() == described(KNOWN) + "\n"
    wins = fastest(KNOWN, "strong")
    assert wins[256][0] == "zero-3" and wins[4096][0] == "2.5d" and wins[4][1] == ""
    assert {one["way"] for one in KNOWN["points"]} <= set(WAYS)


def test_a_wrong_number_of_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="curves begin at 4 ranks"):
        main(["--ranks", "2", "--out", str(tmp_path / "growth.json")])
