"""``meshfold calibrate``: a file that ``plan`` takes as a machine, and refusals before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfold.cli import main
from meshfold.planner import find_machine


def test_plan_takes_the_file_that_calibrate_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    assert main(["calibrate", "--tiny", "--device", "cpu", "--name", "mine", "--out", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "matmuls, TFLOP/s" in printed and f"--machine {file}" in printed
    assert "--ranks 2 measures them" in printed  # one rank has no links
    assert find_machine(str(file)).name == "mine"
    assert main(["plan", "--model", "gpt-tiny", "--batch-size", "1", "--machine", str(file)]) == 0
    assert " on mine" in capsys.readouterr().out


def test_refusals_come_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, said in (
        (["--out", str(tmp_path / "machine.txt")], f"write --out {tmp_path / 'machine.json'}"),
        (["--disk", str(tmp_path / "none"), "--out", str(tmp_path / "m.json")], "there is no such folder"),
        (["--device", "cuda", "--ranks", "64", "--out", str(tmp_path / "m.json")], "use --device cpu"),
    ):
        assert main(["calibrate", *words]) == 2
        error = capsys.readouterr().err
        assert said in error and len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
