"""The experiment fastfold: its numbers made anew, a part of each; what is common to all experiments is checked elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from experiments.fastfold import gradients, memory, overlap, settings, traffic, training
from experiments.fastfold.run import EXPERIMENT
from meshfold.mesh import collectives
from meshfold.mesh.model_io import Operator
from meshfold.planner import find_machine
from meshfold.planner.clock import Work

INITIAL, FINE = settings.phases()


def committed(part: str) -> Any:
    return json.loads((EXPERIMENT.folder / "results" / "simulated.json").read_text(encoding="utf-8"))[part]


def test_hours_are_steps_times_seconds() -> None:
    found = training.everything([INITIAL, FINE])
    assert found["FastFold"]["hours"] == pytest.approx((78125 * 2.467 + 11718.75 * 4.153) / 3600)
    for name, row in committed("training").items():
        assert found[name] == pytest.approx(row)
    with pytest.raises(KeyError, match="fine-tuning"):
        training.everything([INITIAL])


def test_traffic_is_counted_as_committed() -> None:
    (row,) = traffic.everything([INITIAL], [4])
    assert row == next(one for one in committed("traffic") if (one["phase"], one["N"]) == (INITIAL.name, 4))
    assert row["tensor"]["forward"] == 2 * 3 / 4 * 3 * 256 * (128 * 256 + 256 * 128)  # six all-reduces


def test_memory_falls_with_the_ranks_and_the_longest_chain_is_found() -> None:
    one, four = memory.kept([INITIAL], (1, 4))
    assert one["bytes"] / 4 < four["bytes"] < 1.08 * one["bytes"] / 4
    assert 3 < memory.predicting(1, 2048) / memory.predicting(4, 2048) < 4
    seen: list[int] = []

    def peak(residues: int) -> int:
        seen.append(residues)
        return 100 + 3 * residues**2

    for limit in (3 * 1024**2 + 100, 3 * 1024**2 + 99, 3 * 9000**2):
        found = memory.longest(limit, peak)
        assert found % memory.MULTIPLE == 0
        assert 100 + 3 * found**2 <= limit < 100 + 3 * (found + memory.MULTIPLE) ** 2
    assert len(seen) < 15


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="128 sequences of 30 residues do not divide over 4 ranks"):
        settings.inputs(4, 128, 30)


def test_a_collective_runs_beside_operators_until_it_is_awaited() -> None:
    """A gather of a second, operators of 0.4 seconds, the wait, 0.4 seconds: 1.4 s beside each other, 1.8 s in turn."""
    machine = find_machine(overlap.MACHINE)
    block = torch.empty(int((1 - machine.latency) * machine.inside), dtype=torch.uint8, device="meta")
    rate = 1e12 / Work(operators={Operator(10**12): 1}).seconds(machine, overlap.PRECISION)
    busy = Operator(int(0.4 * rate))
    with settings.rank_of(2) as (_, mesh):
        for overlaps, wanted in ((True, 1.4), (False, 1.8)):
            with overlap.Timeline(machine, mesh, overlaps=overlaps) as timeline:
                coming = collectives.all_gather(block, mesh.group("axial"), 0, async_op=True)
                timeline.note(busy)
                coming.wait()
                timeline.note(busy)
            assert timeline.now == pytest.approx(wanted, rel=1e-3)
            assert timeline.sent == pytest.approx(1.0)


def test_a_block_on_the_clock() -> None:
    found = overlap.block_seconds(4, 128, 256)
    then = next(one for one in committed("overlap") if (one["phase"], one["N"]) == (INITIAL.name, 4))
    assert found["async"] < found["sync"] < found["async"] + found["link"]
    assert found["link"] == pytest.approx(then["link"])


def test_either_fault_makes_nine_of_ten_gradients_wrong() -> None:
    for row, then in zip(gradients.everything(), committed("gradients"), strict=True):
        assert (row["wrong"], row["gradients"]) == (then["wrong"], then["gradients"])
        assert row["worst"] == pytest.approx(then["worst"], rel=1e-6, abs=1e-9) and row["outputs"] < 1e-12
