"""Launches of a host: what a tiny model measures of them, and what plans charge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.kernels.fuse import fuse
from meshfold.mesh import Mesh, start
from meshfold.mesh.model_io import DryRun, Operator
from meshfold.mesh.testing import ranks
from meshfold.planner import MACHINES, find_machine
from meshfold.planner.calibration import TINY, write_machine
from meshfold.planner.calibration.launches import (
    Counts,
    HostSeconds,
    _Model,
    counted,
    launches_of,
    measure_launches,
    with_experts,
    with_sums,
    with_units,
)
from meshfold.planner.clock import Work
from meshfold.planner.efficiency import Launches

H200 = MACHINES["h200x8"]


def test_launches_explain_the_seconds_that_a_model_took() -> None:
    known = Launches(forward=2.0, backward=1.0, kernel_forward=5.0, kernel_backward=7.0, parameter=3.0)
    without = Counts(forward=10, backward=30, kernels_forward=0, kernels_backward=0, parameters=4)
    fused = Counts(forward=8, backward=26, kernels_forward=2, kernels_backward=3, parameters=4)

    def took(counts: Counts) -> HostSeconds:
        return HostSeconds(
            forward=2.0 * counts.forward + 5.0 * counts.kernels_forward,
            backward=1.0 * counts.backward + 7.0 * counts.kernels_backward,
            update=3.0 * counts.parameters,
        )

    assert launches_of(took(without), took(fused), without, fused) == known
    # Where no kernel runs, one takes as long as any operator; and noise makes no launch free.
    assert launches_of(took(without), took(without), without, without).kernel_backward == 1.0
    quick = replace(took(fused), forward=0.0)
    assert launches_of(took(without), quick, without, fused).kernel_forward == 1.0


def test_sums_that_wait_take_what_norms_alone_do_not() -> None:
    """Kernels were charged for the Python of the sums that half of the norms compute."""
    known = Launches(forward=2.0, backward=1.0, kernel_forward=5.0, kernel_backward=7.0, parameter=3.0)
    counts = Counts(forward=8, backward=20, kernels_forward=4, kernels_backward=4, parameters=4, sums=2)
    found = with_sums(known, HostSeconds(forward=16.0 + 20.0 + 6.0, backward=0.0, update=0.0), counts)
    assert found == replace(known, residual=3.0)
    assert with_sums(known, HostSeconds(forward=1.0, backward=0.0, update=0.0), counts) == known  # noise
    assert with_sums(known, HostSeconds(forward=99.0, backward=0.0, update=0.0), replace(counts, sums=0)) == known
    # Experts of a model whose norms compute sums are not charged for these.
    both = replace(counts, backward=0, kernels_backward=0)
    took = HostSeconds(forward=16.0 + 20.0 + 6.0 + 8.0, backward=0.0, update=0.0)
    assert with_experts(found, took, both, layers=2).experts_forward == 4.0


def test_a_norm_that_computes_a_sum_is_charged_for_it() -> None:
    slow = replace(H200, launches=Launches(**{**dict.fromkeys(vars(Launches()), 0.0), "residual": 2.0}))
    for rules, sums in ((dict(residual=False), 0), (dict(), 3)):
        with torch.device("meta"):
            model, ids = _Model(3, norms=True, experts=False).bfloat16(), torch.empty(1, 8, dtype=torch.int64)
        fuse(model, **rules)
        with DryRun() as run, Work.counted(run) as counter:
            model(ids, ids)["loss"].backward()
        phases = Work.of(counter).phases(slow, "bf16")
        assert (phases.launched_forward, phases.launched_backward) == (2.0 * sums, 0.0)  # the forward's Python


@ranks(2)
def test_a_model_takes_as_long_as_on_its_slowest_rank_before_its_seconds_are_divided() -> None:
    """The most of the ranks' differences was larger than any rank's: here 9 for a kernel."""
    from meshfold.planner.calibration import launches as module

    counts = Counts(forward=10, backward=10, kernels_forward=0, kernels_backward=0, parameters=1)
    fused = replace(counts, kernels_forward=10, kernels_backward=10)
    with start() as process, pytest.MonkeyPatch.context() as patched:
        plain, norms = ((20.0, 80.0), (10.0, 100.0))[process.rank]

        def took(_: Any, __: Any, kinds: Any) -> list[HostSeconds]:
            seconds = [norms if kind.norms else plain for kind in kinds]
            return [HostSeconds(forward=one, backward=one, update=1.0) for one in seconds]

        patched.setattr(module, "_measured", took)
        patched.setattr(module, "_counted_kind", lambda _, __, kind: fused if kind.norms else counts)
        mesh = Mesh({"rank": 2})
        found = measure_launches(process, TINY, mesh.group("rank"))
        assert (found.forward, found.kernel_forward, found.kernel_backward) == (2.0, 8.0, 8.0)
        mesh.close()


def test_layers_of_experts_take_what_their_operators_do_not_explain() -> None:
    known = Launches(forward=2.0, backward=1.0, kernel_forward=5.0, kernel_backward=7.0, parameter=3.0)
    counts = Counts(forward=10, backward=20, kernels_forward=3, kernels_backward=2, parameters=4)
    took = HostSeconds(forward=20.0 + 15.0 + 8.0, backward=20.0 + 14.0 + 6.0, update=0.0)
    found = with_experts(known, took, counts, layers=2)
    assert (found.experts_forward, found.experts_backward) == (4.0, 3.0)
    assert replace(found, experts_forward=0.0, experts_backward=0.0) == known
    quick = with_experts(known, replace(took, forward=1.0), counts, layers=2)
    assert quick.experts_forward == 0.0  # noise makes no layer faster than its operators


def test_units_under_zero_take_what_a_forward_takes_longer() -> None:
    known, plain = Launches(forward=2.0), HostSeconds(forward=20.0, backward=30.0, update=1.0)
    took = HostSeconds(forward=26.0, backward=90.0, update=9.0)
    assert with_units(known, plain, took, units=3) == replace(known, unit=2.0)
    assert with_units(known, plain, replace(took, forward=19.0), units=3) == known  # noise


def test_the_launches_of_units_are_measured_under_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfold.planner.calibration import launches as module

    made, engine = list[dict[str, Any]](), module.Engine

    def noted(*args: Any, **settings: Any) -> Any:
        made.append(settings["parallel"])
        return engine(*args, **settings)

    monkeypatch.setattr(module, "Engine", noted)
    monkeypatch.setattr(module, "_slowest", lambda took, everyone, device: took)
    seconds = (20.0, 20.0, 20.0, 20.0, 35.0)
    measured = module._measured

    def took(*args: Any) -> list[HostSeconds]:
        return [replace(one, forward=forward) for one, forward in zip(measured(*args), seconds, strict=True)]

    monkeypatch.setattr(module, "_measured", took)
    with start() as process:
        mesh = Mesh({"rank": 1})
        found = measure_launches(process, TINY, mesh.group("rank"))
        mesh.close()
    assert found.unit == (35.0 - 20.0) / (TINY.layers + 2)  # its layers, the embedding and the head
    assert [*made] == [{}, {}, {}, {}, {"zero": {"stage": 1}}]


def test_models_are_timed_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are differences of models' seconds: one after another, a host that became slower was a kernel's fault."""
    from meshfold.planner.calibration import launches as module

    turns, step = list[int](), module._TinyTraining.step

    def noted(self: Any) -> HostSeconds:
        turns.append(id(self))
        return step(self)

    monkeypatch.setattr(module._TinyTraining, "step", noted)
    with start() as process:
        took = module._measured(process, replace(TINY, warm_up=1, steps=2), module._KINDS)
    assert len(took) == len(module._KINDS) and all(one.forward > 0 for one in took)
    assert len(set(turns[:5])) == 5 and turns == 3 * turns[:5]


def test_a_model_of_experts_is_charged_for_its_layers() -> None:
    """Once in a forward and once in a backward; a forward that recomputation runs again has no backward of its own."""
    slow = replace(H200, launches=Launches(**{**dict.fromkeys(vars(Launches()), 0.0), "experts_forward": 2.0}))
    both = replace(slow, launches=replace(slow.launches, experts_backward=3.0))
    places = {
        phase: Operator(0, bytes=8, phase=phase, ours=True, name="expert_places.placed")
        for phase in ("forward", "repeated")
    }
    work = Work(operators={places["forward"]: 4, places["repeated"]: 4, Operator(0, bytes=8, name="aten.add"): 9})
    phases = work.phases(both, "bf16")
    assert (phases.launched_forward, phases.launched_backward) == (8.0, 8.0 + 12.0)
    for experts, layers in ((False, 0), (True, 2)):
        with torch.device("meta"):
            model = _Model(2, norms=False, experts=experts)
            ids = torch.empty(1, 8, dtype=torch.int64)
        with DryRun() as run, Work.counted(run) as counter:
            model.bfloat16()(ids, ids)["loss"].backward()
        assert Work.of(counter).phases(slow, "bf16").host == pytest.approx(2.0 * layers)
        # A GPU multiplies the rows of all experts in one launch, without filling the result before.
        assert not layers or not any(one.name == "aten.new_zeros" for one in counter.counts)


def test_the_model_that_measures_launches_has_kernels_on_a_gpu_only() -> None:
    plain, fused = (counted(2, "cuda", norms=norms) for norms in (False, True))
    cpu = counted(2, "cpu", norms=True)
    assert plain.kernels_forward == plain.kernels_backward == cpu.kernels_forward == 0
    assert fused.kernels_forward == fused.kernels_backward == 4  # two norms of each layer
    assert fused.forward <= plain.forward  # sums go into the norms
    assert plain.parameters == fused.parameters - 2 * 4 == 2 * 8 + 3


def test_a_file_with_one_number_for_all_launches_is_read(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    write_machine(H200, file, {})
    assert find_machine(str(file)).launches == H200.launches
    found = json.loads(file.read_text())
    del found["launches"]
    file.write_text(json.dumps(found | {"launch": 1e-6}))
    assert find_machine(str(file)).launches == Launches.of_all(1e-6)
