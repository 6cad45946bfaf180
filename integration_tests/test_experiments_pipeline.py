"""The experiments gpipe, zero-bubble and hanayo: simulated anew, the committed numbers, and verdicts that can fail.

What is common to all is checked of the others, too; their numbers are made anew in files of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import report
from experiments.fastfold import run as fastfold
from experiments.gpipe import run as gpipe
from experiments.gpipe.simulated import heaviest_stage, throughput
from experiments.hanayo import run as hanayo
from experiments.hanayo.simulated import row as hanayo_row
from experiments.megascale import run as megascale
from experiments.megatron import run as megatron
from experiments.report import Case, Claim, rounded, verdict
from experiments.selective_recompute import run as selective_recompute
from experiments.sequence_parallelism import run as sequence_parallelism
from experiments.zero_bubble import measured, settings
from experiments.zero_bubble import run as zero_bubble
from experiments.zero_bubble.claims import published
from experiments.zero_bubble.heuristic import Times, heuristic
from experiments.zero_bubble.simulated import everything, rates_v
from experiments.zero_memory import run as zero_memory
from integration_tests.committed import check_committed, committed
from meshfold.mesh.testing import ranks
from meshfold.pipeline import ScheduleError, schedule, simulate

ALL = {
    "gpipe": gpipe.EXPERIMENT,
    "zero-bubble": zero_bubble.EXPERIMENT,
    "hanayo": hanayo.EXPERIMENT,
    "sequence-parallelism": sequence_parallelism.EXPERIMENT,
    "fastfold": fastfold.EXPERIMENT,
    "megatron": megatron.EXPERIMENT,
    "megascale": megascale.EXPERIMENT,
    "selective-recompute": selective_recompute.EXPERIMENT,
    "zero-memory": zero_memory.EXPERIMENT,
}
MAINS: dict[str, Callable[..., int]] = {
    "gpipe": gpipe.main,
    "zero-bubble": zero_bubble.main,
    "hanayo": hanayo.main,
    "sequence-parallelism": sequence_parallelism.main,
    "fastfold": fastfold.main,
    "megatron": megatron.main,
    "megascale": megascale.main,
    "selective-recompute": selective_recompute.main,
    "zero-memory": zero_memory.main,
}


# -- numbers --------------------------------------------------------------------------------------------------------


def test_gpipe_is_simulated_as_committed() -> None:
    assert rounded(gpipe.EXPERIMENT.simulate()) == committed(gpipe.EXPERIMENT)


def test_hanayo_is_simulated_as_committed() -> None:
    then = committed(hanayo.EXPERIMENT)
    for row in then["free messages"][:3] + then["messages"][-1:]:
        assert rounded(hanayo_row(row["P"], row["send"])) == row


def test_zero_bubble_is_simulated_as_committed() -> None:
    """One model, without the search, which ``auto``'s own tests look at."""
    then = committed(zero_bubble.EXPERIMENT)
    now = rounded(everything(0, ["1.5B"]))
    for part in ("rates", "throughput"):
        assert now[part] == [row for row in then[part] if row["model"] == "1.5B"]
    assert {row["p"] for row in then["auto"]} == {8} and len(then["auto"]) == 12


def test_table_8_is_fitted_as_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = report.read_csv
    monkeypatch.setattr(
        settings, "read_csv", lambda path: honest(path)[: 9 if path.name == "published_costs.csv" else 1]
    )
    (setting,) = settings.fitted_settings(["6.2B"])
    assert rounded(rates_v(setting)) == committed(zero_bubble.EXPERIMENT)["fitted"][0]


def test_the_throughput_of_gpipe_is_its_closed_form() -> None:
    assert throughput(4, 8) == pytest.approx(4 * 8 / (4 + 8 - 1))
    assert throughput(8, 1, 2.0) == pytest.approx(1.0)  # one micro-batch takes all the work, wherever it lies
    assert throughput(4, 32, heaviest_stage(4, 32, 1.84)) == pytest.approx(1.84)


# -- the paper's heuristic ------------------------------------------------------------------------------------------


def test_the_heuristic_keeps_to_its_memory_and_leaves_no_gap() -> None:
    times = Times(forward=1.0, backward_input=1.0, backward_weight=1.0, send=0.0)
    made = schedule(heuristic(times, 8), ranks=4, microbatches=12, memory=8)
    assert simulate(made).span_bubble == pytest.approx(0)
    for memory in (5, 6, 8):
        made = schedule(heuristic(times, memory), ranks=4, microbatches=12)
        assert max(simulate(made).peak) <= memory
    with pytest.raises(ScheduleError, match="the bound is 6"):
        schedule(heuristic(times, 8), ranks=4, microbatches=12, memory=6)


def test_the_heuristic_is_the_papers_on_their_largest_pipeline() -> None:
    setting = next(one for one in settings.published_settings() if (one.p, one.m) == (32, 96))
    printed = float(published("published_rates.csv")["28.3B", 96]["ZB-2p"])
    assert setting.rate(setting.make_own(heuristic(setting.times, 64))) == pytest.approx(printed, abs=1e-4)
    assert setting.rate(setting.make("zb-h2")) > printed + 0.05


# -- schedules that run ---------------------------------------------------------------------------------------------


@ranks(2)
def test_schedules_are_measured() -> None:
    sizes = dict(layers=4, hidden=16, heads=2, sequence=8, vocabulary=32, rows=1, microbatches=4, repeats=2)
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    found = measured.MEASURED.take(measured.MEASURED.options(words), 2, torch.device("cpu"))
    rows = {row["schedule"]: row for row in found["schedules"]}
    assert list(rows) == [*measured.SCHEDULES, "ZB-2p (heuristic)", "auto, 2 p"]
    assert len({row["loss"] for row in rows.values()}) == 1
    assert all(row["seconds"] > 0 and row["simulated seconds"] > 0 for row in rows.values())
    assert rows["1F1B"]["activations"] == 2 and rows["ZB-H2"]["activations"] == 3
    assert all(row["activations"] <= 4 for row in rows.values())
    text = measured.page(found)
    assert "2 ranks on CPU" in text and "the same to the bit" in text


def test_what_was_measured_is_judged_by_the_numbers() -> None:
    def row(name: str, seconds: float, clock: float, idle: float, loss: float) -> dict[str, Any]:
        simulated = {"simulated seconds": clock, "simulated idle": 0.1}
        return {"schedule": name, "seconds": seconds, "idle": idle, "loss": loss, **simulated}

    found: dict[str, Any] = {"device": "CPU", "ranks": 4, "cores": 2}
    found["schedules"] = [row("1F1B", 2.0, 1.8, 0.12, 1.5), row("ZB-V", 1.0, 1.9, 0.15, 1.5)]
    said = measured.said(found)
    assert "within 5.0 points" in said and "Fastest: ZB-V; on the clock: 1F1B" in said
    assert "the same to the bit" in said and "4 ranks shared 2 cores" in said
    found["schedules"][1]["loss"] = 1.75
    assert "from 1.5 to 1.75" in measured.said({**found, "device": "a GPU"})
    assert "shared" not in measured.said({**found, "device": "a GPU"})


def test_what_was_measured_stands_beside_the_papers_gains() -> None:
    folder = Path(measured.__file__).parent / "results"
    found = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    assert (folder / "measured.md").read_text(encoding="utf-8") == measured.page(found)
    gains = measured.published_gains(found)
    assert gains["ZB-H1"] == pytest.approx(12.9 / 11.8) and gains["ZB-2p (heuristic)"] == pytest.approx(13.11 / 11.8)
    for other in ({"hidden": 1024}, {"microbatches": 8}, {"rows": 1}, {"ranks": 2}):
        assert measured.published_gains({**found, **other}) == {}


def test_sizes_belong_to_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zero_bubble.main(["--layers", "4"])
    assert "unrecognized arguments: --layers 4" in capsys.readouterr().err


# -- verdicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_what_is_committed_is_made_from_the_committed_numbers(name: str) -> None:
    check_committed(ALL[name])


def spoil_gpipe(found: dict[str, Any]) -> None:
    found["bubbles"][5]["simulated"] += 0.01


def spoil_zero_bubble(found: dict[str, Any]) -> None:
    found["rates"][3]["rate"]["ZB-H1"] += 0.001


def spoil_hanayo(found: dict[str, Any]) -> None:
    found["free messages"][1]["hanayo"]["4"] = 0.3


def spoil_sequence_parallelism(found: dict[str, Any]) -> None:
    found["runs"][4]["dK ratio"] = 0.25


def spoil_fastfold(found: dict[str, Any]) -> None:
    found["gradients"][0]["wrong"] = 1


def spoil_megatron(found: dict[str, Any]) -> None:
    found["table 1"][4]["ours, seconds"] *= 1.2


def spoil_megascale(found: dict[str, Any]) -> None:
    found["table 3"][2]["ours"] = found["table 3"][1]["ours"] - 0.001


def spoil_selective_recompute(found: dict[str, Any]) -> None:
    found["bytes"][2]["counted"] *= 1.06


def spoil_zero_memory(found: dict[str, Any]) -> None:
    found["plans"][5]["sent"]["parameters"] += 0.1


@pytest.mark.parametrize(
    ("name", "spoil", "claim"),
    [
        ("gpipe", spoil_gpipe, "idle share (K − 1) / (M + K − 1)"),
        ("zero-bubble", spoil_zero_bubble, "table 5's 1F1B, ZB-H1, ZB-H2"),
        ("hanayo", spoil_hanayo, "more waves idle less"),
        ("sequence-parallelism", spoil_sequence_parallelism, "dQ, dK and dV whole"),
        ("fastfold", spoil_fastfold, "every gradient of one process"),
        ("megatron", spoil_megatron, "iteration times of table 1"),
        ("megascale", spoil_megascale, "each change gains"),
        ("selective-recompute", spoil_selective_recompute, "bytes of a layer under six schemes"),
        ("zero-memory", spoil_zero_memory, "2Ψ, 2Ψ and 3Ψ"),
    ],
)
def test_a_wrong_number_is_not_reproduced(
    name: str,
    spoil: Callable[[dict[str, Any]], None],
    claim: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = committed(ALL[name])
    options = ["--render", "--no-plots", "--output", str(tmp_path)]
    (tmp_path / "simulated.json").write_text(json.dumps(found))
    assert MAINS[name](options) == 0
    before = (tmp_path / "table.md").read_text(encoding="utf-8")
    spoil(found)
    (tmp_path / "simulated.json").write_text(json.dumps(found))
    assert MAINS[name](options) == 1
    after = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert after.count("**not reproduced**") > before.count("**not reproduced**")
    said = capsys.readouterr()
    reproduced, _, missed = said.out.rpartition("Reproduced: ")[2].partition("Not reproduced: ")
    assert claim in missed and claim not in reproduced
    assert claim in said.err


def test_a_changed_published_number_is_not_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.zero_bubble import claims

    honest = report.read_csv

    def other(path: Path) -> list[dict[str, str]]:
        rows = honest(path)
        if path.name == "published_rates.csv":
            rows[0]["ZB-2p"] = "0.0533"
        return rows

    monkeypatch.setattr(claims, "read_csv", other)
    missed = [one for one in claims.claims(committed(zero_bubble.EXPERIMENT)) if one.holds != one.expected]
    assert [(one.name, one.failed[0].what) for one in missed] == [("table 5's ZB-2p", "ZB-2p, 1.5B, m 24")]


def claim(*cases: tuple[float, float], tolerance: float = 0.1, **options: Any) -> Claim:
    made = [Case(str(i), theirs, ours) for i, (theirs, ours) in enumerate(cases)]
    return Claim(name="it", claim="", mark="P", cases=made, tolerance=tolerance, because="", **options)


def test_how_far_off_a_claim_is() -> None:
    assert claim((1, 1), (2, 2)).said == "exact"
    assert claim((1, 1.05)).said == "within 0.0500"
    assert claim((1, 1.05001)).said == "within 0.0501"
    assert claim((2, 2.3)).said.startswith("**not reproduced**, off by up to 0.3")
    assert claim((2, 2.1), relative=True).said == "within 5.0 %"
    assert claim((2, 1.0), one_sided=True).said == "exact"
    assert not claim((2, 2.2), one_sided=True).holds
    assert not claim().holds and claim().said == "not simulated"
    assert verdict([claim((2, 3)), claim()]) == "Nothing was reproduced. Not reproduced: it (off by up to 1.0000)."
    assert verdict([claim((1, 1))]) == "Reproduced: it (exact)."


# -- the command ----------------------------------------------------------------------------------------------------


def test_a_run_leaves_numbers_table_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpipe.main(["--output", str(tmp_path / "new")]) == 0
    for name in ("simulated.json", "table.md"):
        assert (tmp_path / "new" / name).read_bytes() == (gpipe.EXPERIMENT.folder / "results" / name).read_bytes()
    assert (tmp_path / "new" / "gpipe.png").read_bytes().startswith(b"\x89PNG")
    assert "\nReproduced: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_script_runs_by_itself_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "simulated.json").write_text(json.dumps(committed(hanayo.EXPERIMENT)))
    script = [str(hanayo.EXPERIMENT.folder / "run.py"), "--render", "--no-plots", "--output", str(tmp_path)]
    done = subprocess.run([sys.executable, *script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Reproduced: " in done.stdout


def test_without_numbers_the_error_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hanayo.main(["--render", "--output", str(tmp_path / "nothing")]) == 1
    assert "simulated.json" in capsys.readouterr().err
