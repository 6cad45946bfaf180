"""The folder of a run: one run writes there at a time, and what it remembers need not be typed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshfold.checkpoint.folder import hold_lock
from meshfold.cli import main, train
from meshfold.mesh import SpecError
from meshfold.train.metrics import read_metrics
from meshfold.train.run_folder import LOCK, read_settings

TINY = [
    "--model",
    "gpt-tiny",
    "--set",
    "hidden=16",
    "layers=1",
    "heads=2",
    "--seq-len",
    "16",
    "--batch-size",
    "4",
    "--no-plan",
]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a document to train on. " * 60)
    return folder


def losses() -> list[float]:
    return [row["loss"] for row in read_metrics(Path("run/metrics.jsonl")) if "loss" in row]


def looks_at_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command does not look at the folder before its ranks start."""
    monkeypatch.setattr(train, "check_unused", lambda settings: None)
    monkeypatch.setattr(train, "check_folder", lambda settings, progress: None)


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize("early", [True, False], ids=["looked at first", "in the ranks"])
def test_two_runs_in_one_folder_are_refused(
    early: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not early:  # both began at the same moment
        looks_at_no_folder(monkeypatch)
    Path("run").mkdir()
    with hold_lock(Path("run", LOCK), doing="training into it"):
        assert main(["train", "--data", "texts", *TINY, "--steps", "1", "--out", "run"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "run is in use: process " in said
    assert "has been training into it since" in said and "give another folder" in said
    assert ("--out 'run': " in said) is not early
    assert not {path.name for path in Path("run").iterdir()} & {
        "metrics.jsonl",
        "checkpoint",
        "settings.json",
    }


@pytest.mark.usefixtures("text")
def test_a_run_that_finished_meanwhile_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--data", "texts", *TINY, "--steps", "1", "--out", "run"]
    assert main(words) == 0
    assert not Path("run", LOCK).exists()
    before = losses()
    looks_at_no_folder(monkeypatch)
    assert main([*words, "--seed", "3"]) == 1
    assert "--out 'run': another run has finished there in the meantime: run/checkpoint" in capsys.readouterr().err
    assert losses() == before and read_settings("run")["seed"] == 0


@pytest.mark.usefixtures("text")
def test_resume_and_the_folder_are_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [
        "--rule",
        "*.norm2=replicate",
        "--precision",
        "bf16",
        "--validation",
        "0.2",
        "--exclude",
        "x",
        "y",
    ]
    words = ["train", "--data", "texts", *TINY, *more, "--parallel", "dict(tensor=1)", "--steps", "3"]
    assert main([*words, "--stop-after", "2", "--out", "run"]) == 0
    assert main([*words, "--out", "whole"]) == 0
    capsys.readouterr()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # paths hold from another folder too
    assert main(["train", "--resume", "--out", "../run"]) == 0
    assert "from here on" not in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert read_metrics(Path("run/metrics.jsonl"))[-1]["validation_loss"] == pytest.approx(
        read_metrics(Path("whole/metrics.jsonl"))[-1]["validation_loss"]
    )
    assert len(losses()) == 3

    # A run that has nothing to do changes neither the picture nor what the folder remembers.
    remembered, picture = Path("run/settings.json").read_bytes(), Path("run/loss.png")
    drawn = picture.stat().st_mtime_ns if picture.exists() else 0
    assert main(["train", "--resume", "--out", "run", "--clip", "2", "--parallel", "data=1"]) == 0
    assert "nothing to do: the checkpoint is at step 3" in capsys.readouterr().out
    assert Path("run/settings.json").read_bytes() == remembered
    assert (picture.stat().st_mtime_ns if picture.exists() else 0) == drawn


@pytest.mark.usefixtures("text")
def test_a_folder_that_does_not_say_what_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", "--out", "run"]) == 2
    assert "--resume: there is no checkpoint in 'run' to resume from" in capsys.readouterr().err
    assert main(["train", "--data", "texts", *TINY, "--steps", "1", "--out", "run"]) == 0
    capsys.readouterr()
    Path("run/settings.json").unlink()
    assert main(["train", "--resume", "--out", "run"]) == 2
    assert "--resume: no settings.json in 'run' says what the run reads: type --data" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [dict(steps="many"), dict(clip=None), dict(parallel=[2]), dict(seed=True), dict(model=3), dict(exclude="x")],
)
def test_kept_settings_of_another_kind_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps(dict(lr=1, hf=None) | wrong))
    with pytest.raises(SpecError, match=f"settings.json has {next(iter(wrong))}="):
        read_settings(str(tmp_path))


def test_what_is_no_object_of_settings_is_refused(tmp_path: Path) -> None:
    assert read_settings(str(tmp_path)) == {}
    for text in ("[1]", "{", "[" * 100_000, ""):
        (tmp_path / "settings.json").write_text(text)
        with pytest.raises(SpecError, match=r"cannot read .*settings.json: .*type the options of the run again"):
            read_settings(str(tmp_path))
    (tmp_path / "settings.json").write_text('{"lr": 1, "checksum": "0"}')
    with pytest.raises(
        SpecError, match=r"settings.json is damaged or was changed by hand: .*remove its entry \"checksum\""
    ):
        read_settings(str(tmp_path))
    (tmp_path / "settings.json").write_text('{"parallel": {"tensor": {"grid": [2, 1]}}, "lr": 1}')
    assert read_settings(str(tmp_path)) == dict(parallel=dict(tensor=dict(grid=(2, 1))), lr=1)
