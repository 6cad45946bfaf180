"""The experiments that are made of plans and the planner's clock, and the page of all verdicts."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from experiments import all as every
from experiments.megascale import run as megascale
from experiments.megatron import layer, run, simulated, step
from experiments.megatron.step import Run
from experiments.report import Experiment, rounded, with_results
from experiments.selective_recompute import counting
from experiments.selective_recompute import run as selective
from experiments.selective_recompute import simulated as recomputed
from experiments.zero_memory import run as zero
from experiments.zero_memory import simulated as states
from meshfold.cli import main
from meshfold.planner import find_machine

MACHINE = find_machine(simulated.MACHINE)
SMALL = Run(layers=4, hidden=256, heads=4, vocabulary=512, sequence=128, batch=64, gpus=8, tensor=2, pipeline=2)


@pytest.mark.parametrize("experiment", [run.EXPERIMENT, megascale.EXPERIMENT], ids=["megatron", "megascale"])
def test_verdicts_on_the_clock_are_those_of_the_page(experiment: Experiment) -> None:
    """The clock may become better, so numbers may differ a little from the committed ones; a verdict may not."""
    then = json.loads((experiment.folder / "results" / "simulated.json").read_text(encoding="utf-8"))
    now = rounded(experiment.simulate())
    assert_close(now, then)
    assert [one.name for one in experiment.claims(now) if one.holds != one.expected] == []


def test_verdicts_on_selective_recomputation_are_those_of_the_page() -> None:
    then = json.loads((selective.EXPERIMENT.folder / "results" / "simulated.json").read_text(encoding="utf-8"))
    now = {**then, "layer": recomputed.layers(), "steps": recomputed.steps()}
    assert [one.name for one in selective.EXPERIMENT.claims(now) if one.holds != one.expected] == []
    counted = {row["scheme"]: row["counted"] for row in then["bytes"]}
    for scheme in ("tensor + sequence", "tensor + sequence + selective", "full"):
        assert counting.kept(**counting.SCHEMES[scheme]) == counted[scheme]


def assert_close(now: object, then: object) -> None:
    """Raise unless numbers in a nest are within a tenth of each other."""
    if isinstance(now, dict) and isinstance(then, dict):
        assert list(now) == list(then)
        now, then = list(now.values()), list(then.values())
    if isinstance(now, list) and isinstance(then, list):
        assert len(now) == len(then)
        for one, other in zip(now, then, strict=True):
            assert_close(one, other)
    elif isinstance(now, float):
        assert now == pytest.approx(then, rel=0.1)
    else:
        assert now == then


def test_zero_is_planned_as_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    then = json.loads((zero.EXPERIMENT.folder / "results" / "simulated.json").read_text(encoding="utf-8"))
    planned = iter(then["plans"])
    with monkeypatch.context() as patch:
        patch.setattr(states, "plan", lambda stage, n: next(planned))
        assert rounded(states.everything()) == then
    # A smaller model sends as much a parameter, but for padding.
    monkeypatch.setattr(states, "CONFIG", replace(states.CONFIG, vocab_size=2048, hidden=256, layers=8, heads=4))
    for stage, volume in ((1, 2), (3, 3)):
        assert sum(states.plan(stage, 8)["sent"].values()) == pytest.approx(volume, rel=0.15)


def test_operators_are_those_of_the_published_formulas() -> None:
    """FLOP of a layer are 72 b s h² (1 + s / 6h), a third of them forward; equation 3 has full recomputation, a third more."""
    shape = SMALL.shape
    once = 24 * shape.rows * shape.sequence * shape.hidden**2 * (1 + shape.sequence / (6 * shape.hidden))
    assert shape.tensor * layer.forward(shape).flop == pytest.approx(once)
    assert shape.tensor * layer.backward(shape).flop == pytest.approx(2 * once)
    head = shape.tensor * layer.head(shape, SMALL.vocabulary).flop
    assert SMALL.flop(recomputed=True) == pytest.approx(SMALL.batch * (SMALL.layers * 4 * once + head))
    assert SMALL.flop(recomputed=False) == pytest.approx(SMALL.batch * (SMALL.layers * 3 * once + head))
    flash = replace(shape, flash=True)
    assert layer.forward(flash).flop == layer.forward(shape).flop
    moved = [sum(count * one.bytes for one, count in layer.forward(x).operators.items()) for x in (flash, shape)]
    assert moved[0] < moved[1]
    assert [replace(flash, window=w).visible for w in (0, 128, 64)] == [0.5, 0.5, 0.375]
    beside = layer.forward(replace(flash, parallel_block=True))
    assert sum(beside.operators.values()) == sum(layer.forward(flash).operators.values()) - 2


def test_a_step_is_sane() -> None:
    base = step.step_of(SMALL, MACHINE)
    assert step.step_of(replace(SMALL, recompute="none"), MACHINE).seconds < base.seconds
    selective = step.step_of(replace(SMALL, recompute="selective"), MACHINE).seconds
    assert step.step_of(replace(SMALL, recompute="none"), MACHINE).seconds < selective < base.seconds
    assert step.step_of(replace(SMALL, batch=128), MACHINE).seconds < 2 * base.seconds
    faster = replace(MACHINE, inside=2 * MACHINE.inside, between=2 * MACHINE.between)
    assert step.step_of(SMALL, faster).seconds < base.seconds
    assert step.step_of(replace(SMALL, sequence_parallel=True), MACHINE).seconds <= base.seconds
    before = base.seconds
    for count in (1, 2, 3):
        hidden = frozenset(("tensor", "pipeline", "data")[:count])
        found = step.step_of(replace(SMALL, chunks=2, hidden_traffic=hidden), MACHINE).seconds
        assert found < before
        before = found


def test_long_schedules_are_their_closed_form() -> None:
    for chunks in (1, 2):
        short = step._makespan(4, 16, chunks, 2.0)
        assert short == pytest.approx((16 + 3 / chunks) * 3, rel=0.02)


def test_the_page_and_the_list_of_the_documentation_are_made_from_the_experiments() -> None:
    found = {name: every.verdicts(name) for name in every.names()}
    assert every.PAGE.read_text(encoding="utf-8") == every.page(found)
    listed = every.LIST.read_text(encoding="utf-8")
    assert with_results(listed, every.counts(found, "../experiments/")) == listed
    kinds = {one.kind for some in found.values() for one in some}
    assert kinds == set(every.KINDS)
    assert {one.kind for one in found["fastfold"]} == {"match", "not reproduced", "not run"}


def test_all_runs_every_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(every, "names", lambda: ["gpipe", "megatron"])
    ended = {"gpipe": 0, "megatron": 0}
    for name in ended:
        module = import_module(f"experiments.{name}.run")
        monkeypatch.setattr(module, "main", lambda words, name=name: print(name, words) or ended[name])
    monkeypatch.setattr("meshfold.cli.reproduce._import", lambda folder, file: every)
    words = ["reproduce", "--all", "--render", "--no-plots", "--output", str(tmp_path / "page.md")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "gpipe ['--render', '--no-plots']" in said and " match, " in said
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "## gpipe" in text and "## megatron" in text and "## hanayo" not in text
    ended["megatron"] = 1
    assert main(words) == 1
    assert "not as their pages say: megatron" in capsys.readouterr().err
    assert main(["reproduce", "--list", "--json"]) == 0
    assert "all" not in json.loads(capsys.readouterr().out)


def test_a_folder_without_a_program_for_all_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--all"]) == 2
    assert "benchmarks has nothing that runs all of it; give a name, there are: align, " in capsys.readouterr().err
