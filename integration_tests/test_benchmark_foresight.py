"""``meshfold bench foresight``: its configurations are valid, its errors and verdicts are right, a rank measures a small one."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import write
from benchmarks.foresight import report
from benchmarks.foresight.again import planned_again
from benchmarks.foresight.configurations import GiB, configurations, planned, runnable
from benchmarks.foresight.first_choice import FirstChoice
from benchmarks.foresight.run import _note_plans, main, measure, outcomes
from benchmarks.foresight.worker import measured, run
from benchmarks.power import PowerLog
from meshfold.mesh import Mesh, ParallelSpec, start
from meshfold.mesh.testing import run_on_ranks
from meshfold.planner import Machine, find_machine
from meshfold.planner.calibration import write_machine

KNOWN = configurations()
TINY = replace(KNOWN["cpu-tensor2"], model="llama-tiny", changes=(), seq_len=16, batch=4)


def test_every_configuration_has_its_ranks_and_a_batch_that_divides() -> None:
    assert len(KNOWN) >= 40
    dimensions = set()
    for name, one in KNOWN.items():
        spec = ParallelSpec.parse(one.spec, one.ranks)
        spec.require_installed()
        assert one.batch % (one.accumulate * spec.axes["data"]) == 0, name
        dimensions |= set(one.spec)
    assert dimensions == {"data", "tensor", "pipeline", "sequence", "expert", "zero"}


def test_ranks_and_memory_choose() -> None:
    def names(**at_hand: Any) -> set[str]:
        return set(runnable(KNOWN, **{"device": "cuda", "ranks": 1, "memory": 79.0 * GiB, **at_hand}))

    assert names() < names(memory=139.0 * GiB) and "gpt-10b-offloaded" not in names()
    assert names() < names(ranks=2) < names(ranks=4)
    assert all(name.startswith("cpu-") for name in names(device="cpu", ranks=2))


def result(*configurations: tuple[float, float, list[dict[str, Any]]]) -> dict[str, Any]:
    asked = {"ranks": 1, "parallel": "dict()"}
    return {
        "machine": {"cpu_cores": 2, "torch": "2"},
        "configurations": {
            f"c{n}": {
                "configuration": {**asked, "model": f"m{n}"},
                "planned": {"seconds": seconds, "bytes": held},
                "runs": runs,
            }
            for n, (seconds, held, runs) in enumerate(configurations)
        },
    }


def test_errors_are_of_the_fastest_start_and_the_bars_judge_all() -> None:
    slow, fast = {"seconds": [3.0, 2.0, 2.5], "bytes": 100}, {"seconds": [1.0, 1.0, 9.0], "bytes": 98}
    found = result(
        (1.05, 104, [slow, fast]), (1.15, 0, [{"seconds": [1.0], "bytes": 0}]), (1.0, 1, [{"error": "full"}])
    )
    errors = report.errors(found)
    assert errors["c0"]["time error"] == pytest.approx(0.05) and errors["c0"]["memory error"] == pytest.approx(0.04)
    assert "memory error" not in errors["c1"] and "c2" not in errors
    # One that failed is missed by every bar.
    assert report.shares(found) == {"memory": 1 / 2, "time": pytest.approx(1 / 3), "all": pytest.approx(2 / 3)}
    assert [ok for _, ok in report.verdict_lines(found)] == [False, False, False]
    good = result(*[(1.0, 100, [{"seconds": [1.0], "bytes": 100}])] * 10)
    assert all(ok for _, ok in report.verdict_lines(good))
    text = report.described(found)
    assert "+5.0 %" in text and "full" in text and "not counted" in text


def test_the_table_has_joules_of_the_fastest_start_where_power_was_sampled() -> None:
    """1 s at 700 W are 700 J; the slower start had another power. Without samples there are no such columns."""
    slow, fast = ({"seconds": [seconds], "bytes": 0} for seconds in (3.0, 1.0))
    found = result((1.0, 0, [{**slow, "watts": 300.0, "mhz": 1980.0}, {**fast, "watts": 700.0, "mhz": 1500.0}]))
    for one in found["configurations"].values():
        one["configuration"] |= {"batch": 2, "seq_len": 50}
    text = report.described(found)
    assert "| J a step | J a token | W | MHz |" in text and "| 700.0 | 7.00 | 700 | 1500 |" in text
    assert "J a step" not in report.described(result((1.0, 0, [slow, fast])))


def of_one_model(found: dict[str, Any]) -> dict[str, Any]:
    """Make a result's configurations those of one model under several specs."""
    for n, one in enumerate(found["configurations"].values()):
        one["configuration"] = {"ranks": 1, "model": "m", "parallel": f"data={n}", "accumulate": n}
    return found


def test_the_first_by_plan_is_judged_beside_the_fastest_measured() -> None:
    def ran(seconds: float) -> list[dict[str, Any]]:
        return [{"seconds": [seconds], "bytes": 0}]

    plans = [(1.0, 0, ran(1.2)), (1.1, 0, ran(1.0)), (0.1, 0, []), (2.0, 0, ran(3.0))]
    found = of_one_model(result(*plans))  # the third was not begun
    assert report.firsts_of(found) == [FirstChoice(first="c0", fastest="c1", specs=3, ratio=1.2)]
    line, met = report.verdict_lines(found)[-1]
    assert not met and "1.2" in line and "| c0 | 1: `data=0` | c1 | 3 | 1.200 |" in report.described(found)
    assert report.firsts_of(result(*plans)) == []  # models of one spec each
    assert len(report.verdict_lines(result(*plans))) == 3
    full = of_one_model(result((1.0, 0, [{"error": "full"}]), (1.1, 0, ran(1.0))))
    assert report.firsts_of(full)[0].ratio == float("inf") and "did not run" in report.described(full)
    good = of_one_model(result((1.0, 0, ran(1.04)), (1.1, 0, ran(1.0))))
    assert report.verdict_lines(good)[-1][1]


def test_a_result_has_the_machine_that_was_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that plans can be made again where it is not."""
    out = tmp_path / "foresight.json"
    monkeypatch.setattr("benchmarks.foresight.run.measure", lambda *given: write(out, given[3]))
    words = ["--only", "cpu-gpt", "--machine", "laptop", "--device", "cpu", "--out", str(out)]
    assert main(words) == 1  # nothing was measured
    found = json.loads(out.read_text())
    assert found["calibrated"] == {"1": json.loads(json.dumps(asdict(find_machine("laptop"))))}
    assert found["configurations"]["cpu-gpt"]["planned"]["seconds"] > 0


def test_each_number_of_ranks_is_calibrated_beside_every_round_and_the_middle_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared host is faster at one time than at another; runs stay when plans are made again."""
    happened: list[tuple[str, list[str]]] = []
    laptop = find_machine("laptop")

    def machine(args: Namespace, ranks: int, folder: Path) -> Machine:
        happened.append(("calibrated", [str(ranks)]))
        quick = {key: rate * {3: 4, 5: 2}.get(len(happened), 1) for key, rate in laptop.flops.items()}
        return replace(laptop, flops=quick)

    def measure(names: list[str], turn: int, ranks: int, result: dict[str, Any], args: Namespace, folder: Path) -> None:
        happened.append(("measured", names))
        for name in names:
            result["configurations"][name]["runs"].append({"seconds": [1.0 + turn], "bytes": 1})

    monkeypatch.setattr("benchmarks.foresight.run._machine", machine)
    monkeypatch.setattr("benchmarks.foresight.run.measure", measure)
    names = ["cpu-tensor2", "cpu-gpt", "cpu-data2"]
    assert main(["--only", *names, "--device", "cpu", "--out", str(tmp_path / "found.json")]) == 1
    one, two = ["cpu-gpt"], ["cpu-tensor2", "cpu-data2"]
    each = [(ranks, turn) for ranks, order in (("1", one), ("2", two)) for turn in (order, order[::-1])]
    assert happened == [
        event
        for i, (ranks, turn) in enumerate(each)
        for event in (*[("calibrated", [ranks])] * (i % 2 == 0), ("measured", turn), ("calibrated", [ranks]))
    ]
    found = json.loads((tmp_path / "found.json").read_text())
    assert {ranks: made["flops"]["fp32"] / laptop.flops["fp32"] for ranks, made in found["calibrated"].items()} == {
        "1": 2.0,  # of 1, 4 and 2
        "2": 1.0,
    }
    assert all([run["seconds"] for run in made["runs"]] == [[1.0], [2.0]] for made in found["configurations"].values())
    with pytest.raises(SystemExit, match="no configuration fits the ranks"):
        main(["--only", "cpu-data2", "--ranks", "1", "--device", "cpu", "--out", str(tmp_path / "found.json")])


def test_gpus_are_planned_for_their_fastest_calibration() -> None:
    h200, (_, *others) = find_machine("h200x8"), KNOWN.values()
    plans = [(replace(h200, name=str(s)), {"one": (others[0], {"seconds": s, "bytes": 1})}) for s in (2.0, 1.0, 3.0)]
    found: dict[str, Any] = {"configurations": {"one": {}}}
    _note_plans(found, 1, plans)
    assert found["calibrated"]["1"]["name"] == "1.0" and found["configurations"]["one"]["planned"]["seconds"] == 1.0


def test_plans_for_a_cpu_are_the_medians_of_all_calibrations_at_one_speed() -> None:
    """The second ran while the CPU was half as fast; half of a step waits for memory."""
    laptop = find_machine("laptop")
    plans = [
        (replace(laptop, pace=pace), {"one": (TINY, {"seconds": seconds, "bytes": 1, "paced": 0.5})})
        for pace, seconds in ((1.0, 2.0), (2.0, 4.0), (1.1, 2.2))
    ]
    found: dict[str, Any] = {"configurations": {"one": {}}}
    _note_plans(found, 1, plans)
    assert found["calibrated"]["1"]["pace"] == 1.1  # the middle
    assert found["configurations"]["one"]["planned"]["seconds"] == pytest.approx(2.2)  # of 2.1, 3.1 and 2.2
    _note_plans(found, 1, plans[:2])
    assert found["configurations"]["one"]["planned"]["seconds"] == pytest.approx((2.0 + 3.0) / 2)


def test_a_cpus_steps_are_told_at_the_calibrated_speed() -> None:
    """Matmuls beside them took 2 s where the calibration's took 1: the CPU was half as fast. The median of the starts counts."""
    slow = {"seconds": [4.0, 6.0], "pace": [2.0, 2.0], "bytes": 100}
    usual = {"seconds": [2.0, 1.9, 30.0], "pace": [1.0, 1.0, 10.0], "bytes": 100}
    found = result((2.1, 100, [slow, usual]))
    assert report.errors(found)["c0"]["seconds"] == 2.0  # no speed is known: the faster start's median
    found["calibrated"] = {"1": {"pace": 1.0}}
    assert report.errors(found)["c0"]["seconds"] == 2.25  # of (2, 3) and of (2, 1.9, 3)
    found["calibrated"] = {"1": {"pace": 2.0}}
    assert report.errors(found)["c0"]["time error"] == pytest.approx(2.1 / 4.5 - 1)
    text = report.described(found)
    assert "the median of the starts' medians, at the calibrated speed" in text and "0.36 to 2.00 of it" in text
    found["configurations"]["c0"]["planned"]["paced"] = 0.5  # half of a step waits for memory
    found["calibrated"] = {"1": {"pace": 1.0}}
    assert report.errors(found)["c0"]["seconds"] == pytest.approx(
        (5 / 1.5 + 2) / 2
    )  # of 4 and 6 / 1.5; of 2, 1.9 and 30 / 5.5
    slow.pop("pace")
    assert report.errors(found)["c0"]["seconds"] == 2.0


def test_the_report_writes_table_and_plot(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    file.write_text(json.dumps(result((1.0, 100, [{"seconds": [1.0], "bytes": 100}]))))
    assert main(["--report", str(file)]) == 0
    assert file.with_suffix(".png").stat().st_size > 0 and "within 5 %" in file.with_suffix(".md").read_text()


def test_the_plot_names_what_is_outside_of_every_band() -> None:
    runs = ({"seconds": [1.0], "bytes": 100},)
    found = report._drawn(result((1.15, 100, [*runs]), (1.5, 103, [*runs]), (0.7, 90, [*runs]), (1.0, 100, [*runs])))
    time, memory = ([text.get_text() for text in panel.texts] for panel in found.axes)
    assert time == ["c2", "c1"] and memory == ["c2"]


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """Measure the small configuration."""
    with start() as process:
        mesh = Mesh({"rank": 2})
        found = measured(TINY, folder / str(process.rank), 0.0, mesh.group("rank"), process.device)
        mesh.close()
    return found


def test_ranks_measure_a_step_and_its_tensors(tmp_path: Path) -> None:
    """The plan of memory is near what operators made: of a model so small, within a fifth."""
    found = run_on_ranks(2, on_two_ranks, tmp_path)
    assert all(len(one["seconds"]) == len(one["pace"]) >= 3 for one in found)
    assert found[0]["pace"] == found[1]["pace"] and min(found[0]["pace"]) > 0
    foreseen = planned(TINY, find_machine("laptop"), tmp_path)
    assert not foreseen.misfit and foreseen.seconds > 0
    assert found[0]["bytes"] == found[1]["bytes"] == pytest.approx(foreseen.bytes, rel=0.2)


def test_a_configuration_that_ran_out_of_memory_is_recorded_and_the_others_follow() -> None:
    """Rank 1 was full, the launcher ended the others; what was not begun waits for ranks that begin anew."""
    lines: list[dict[str, Any]] = [
        {"name": "small", "begun": True},
        {"name": "small", "seconds": [1.0], "bytes": 5, "before": 0},
        {"name": "large", "begun": True},
        {"name": "large", "error": "rank 1 ran out of memory: 79 GiB"},
        {"name": "large", "error": "rank 0 ran out of memory: 79 GiB"},
    ]
    small = {"seconds": [1.0], "bytes": 5, "before": 0}
    assert outcomes(lines, "ended with 1") == {"small": small, "large": {"error": "rank 1 ran out of memory: 79 GiB"}}
    assert outcomes(lines[:3], "stopped after 9 s") == {"small": small, "large": {"error": "stopped after 9 s"}}
    assert outcomes(lines[:2], "") == {"small": small} and outcomes([], "ended with 1") == {}


def test_ranks_that_run_out_of_memory_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start of ranks that runs a full configuration ends there; the next one has the rest of them."""
    started: list[list[str]] = []

    def start_ranks(_worker: Path, words: list[str], _ranks: int, _timeout: float) -> tuple[int, str]:
        job = json.loads(words[0])
        started.append(job["names"])
        with Path(job["out"]).open("w") as out:
            for name in job["names"]:
                ended = {"error": "full"} if name == "cpu-gpt" else {"seconds": [1.0], "bytes": 1}
                print(
                    json.dumps({"name": name, "begun": True}), json.dumps({"name": name, **ended}), sep="\n", file=out
                )
                if name == "cpu-gpt":
                    return 1, "out of memory"
        return 0, ""

    monkeypatch.setattr("benchmarks.foresight.run.start_ranks", start_ranks)
    names = ["cpu-gpt-fp64", "cpu-gpt", "cpu-llama"]
    found: dict[str, Any] = {"configurations": {name: {"runs": []} for name in names}}
    args = Namespace(
        rounds=1, device="cpu", window_s=0.0, begun=0.0, budget_s=1.0, timeout=1.0, out=tmp_path / "o.json"
    )
    measure(names, 0, 1, found, args, tmp_path)
    assert started == [names, names[2:]]
    runs = {name: one["runs"][0] for name, one in found["configurations"].items()}
    assert runs["cpu-gpt"] == {"error": "full"} and {len(one["runs"]) for one in found["configurations"].values()} == {
        1
    }
    assert runs["cpu-llama"] == runs["cpu-gpt-fp64"] == {"seconds": [1.0], "bytes": 1}


def test_power_is_sampled_while_a_configuration_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs; the first second is left out, since readings are means over one."""
    asked: list[tuple[float, float, int]] = []

    class Power(PowerLog):
        def __enter__(self) -> PowerLog:
            return self

        def mean(self, begin: float, end: float, gpus: int) -> dict[str, float]:
            asked.append((begin, end, gpus))
            return {"watts": 500.0, "mhz": 1500.0}

    def start_ranks(_worker: Path, words: list[str], _ranks: int, _timeout: float) -> tuple[int, str]:
        line = {"name": "cpu-gpt", "seconds": [1.0], "bytes": 1, "first": 10.0, "last": 14.0}
        Path(json.loads(words[0])["out"]).write_text(json.dumps(line))
        return 0, ""

    monkeypatch.setattr("benchmarks.foresight.run.start_ranks", start_ranks)
    monkeypatch.setattr("benchmarks.foresight.run.PowerLog", Power)
    for device, power in (("cuda", {"watts": 500.0, "mhz": 1500.0}), ("cpu", {})):
        found: dict[str, Any] = {"configurations": {"cpu-gpt": {"runs": []}}}
        given = dict(rounds=1, window_s=0.0, begun=0.0, budget_s=1.0, timeout=1.0, out=tmp_path / "o.json")
        measure(["cpu-gpt"], 0, 1, found, Namespace(**given, device=device), tmp_path)
        assert found["configurations"]["cpu-gpt"]["runs"] == [{"seconds": [1.0], "bytes": 1, **power}]
    assert asked == [(11.0, 14.0, 1)]


def test_a_worker_notes_what_it_begins_and_stops_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.foresight.worker.configurations", lambda: {"small": replace(TINY, ranks=1, parallel="dict()")}
    )
    out = tmp_path / "found.jsonl"
    job: dict[str, Any] = dict(names=["small"], out=str(out), folder=str(tmp_path), device="cpu", window_s=0.0)
    run({**job, "until": 0.0})
    assert not out.exists()
    run({**job, "until": 2.0**40})
    first, second = map(json.loads, out.read_text().splitlines())
    assert first == {"name": "small", "begun": True} and second["bytes"] > 0 and 0 < second["first"] <= second["last"]


def test_measured_configurations_are_planned_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For the machine that they were planned for, and for another one; those that did not run are left out."""
    machine, slower = find_machine("laptop"), tmp_path / "slower.json"
    file = tmp_path / "found.json"
    write_machine(replace(machine, flops={name: rate / 10 for name, rate in machine.flops.items()}), slower, {})
    one = replace(TINY, ranks=1, parallel="dict()")
    foreseen = planned(one, machine, tmp_path)
    entry = {"configuration": asdict(one), "planned": {"seconds": 9.0, "bytes": 1}}
    ran = {**entry, "runs": [{"seconds": [foreseen.seconds, 2 * foreseen.seconds], "bytes": foreseen.bytes}]}
    found = {
        "machine": {"cpu_cores": 2, "torch": "2"},
        "calibrated": {"1": asdict(machine)},
        "configurations": {"tiny": ran, "full": {**entry, "runs": [{"error": "full"}]}},
    }
    file.write_text(json.dumps(found))
    again = planned_again(found, None, None, tmp_path)
    assert list(again["configurations"]) == ["tiny"]
    assert again["configurations"]["tiny"]["planned"] == {
        "seconds": foreseen.seconds,
        "bytes": foreseen.bytes,
        "paced": foreseen.paced,
    }
    assert 0.3 < foreseen.paced <= 1.0  # a tiny model is launches and matmuls
    slow = planned_again(found, find_machine(str(slower)), ["tiny"], tmp_path)["configurations"]["tiny"]["planned"]
    assert slow["seconds"] > foreseen.seconds and slow["bytes"] == foreseen.bytes
    main(["--again", str(file)])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny"))
    assert "| 9 |" in row and row.endswith("| 2.00 |")
    with pytest.raises(SystemExit, match="no measured configuration"):
        main(["--again", str(file), "--only", "full"])
