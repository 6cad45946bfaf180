"""What is measured for real is written row by row, so that a run that is cut keeps what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import all as every
from experiments import all_measured
from experiments.measuring import CUT, Measured, Notes

CPU = torch.device("cpu")


def page(found: Any) -> str:
    return f"<!-- made -->\n\n{[row['square'] for row in found['rows']]}\n"


def squares(notes: Notes) -> None:
    notes.head["title"] = "squares"
    for number in range(notes.options.most):
        notes.add(f"{number}²", lambda: {"square": number * number} if number < 2 else stop())  # noqa: B023


def stop() -> dict[str, Any]:
    raise KeyboardInterrupt


SQUARES = Measured(file=__file__, about="", sizes=[("most", 2, 2, "numbers")], shown=["most"], run=squares, page=page)


def read(folder: Path) -> tuple[dict[str, Any], str]:
    return json.loads((folder / "measured.json").read_text("utf-8")), (folder / "measured.md").read_text("utf-8")


def test_rows_are_said_and_written_as_they_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SQUARES.main(["--output", str(tmp_path)]) == 0
    found, text = read(tmp_path)
    assert found["rows"] == [{"square": 0}, {"square": 1}] and "cut" not in found
    assert (found["ranks"], found["device"], found["most"], found["title"]) == (1, "CPU", 2, "squares")
    assert text == page(found)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" ...")[0] for line in said[:2]] == ["0²", "1²"] and "[0, 1]" in said


def test_a_run_that_is_cut_keeps_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        SQUARES.take(SQUARES.options(["--most=5", "--output", str(tmp_path)]), 1, CPU, writes=True)
    found, text = read(tmp_path)
    assert found["rows"] == [{"square": 0}, {"square": 1}] and found["cut"]
    assert text.endswith(f"\n{CUT}\n")
    assert capsys.readouterr().out.endswith("2² ...")


def test_other_ranks_write_and_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = SQUARES.take(SQUARES.options(["--output", str(tmp_path)]), 4, CPU)
    assert len(found["rows"]) == 2 and not list(tmp_path.iterdir()) and not capsys.readouterr().out


def test_one_start_measures_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(program: list[str], ranks: int) -> int:
        assert (Path(program[0]), ranks) == (Path(all_measured.__file__), 1)
        return all_measured.measure_all(program[1:])

    monkeypatch.setattr("meshfold.mesh.processes.launch", launch)
    words = ["--measure=1", "--output", str(tmp_path)]
    assert every.main([*words, "--only", "auto-checkpointing", "attention-schemes"]) == 0
    for name in ("auto-checkpointing", "attention-schemes"):
        found, text = read(tmp_path / name)
        assert found["ranks"] == 1 and text == all_measured.measured_of(name).page(found)
    said = capsys.readouterr().out
    assert said.index("== auto-checkpointing") < said.index("53 GB ...") < said.index("== attention-schemes")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "gpipe", "--output", "x"], "--only: gpipe cannot be measured; give some of attention-schemes, "),
        ([], "--measure writes a folder for each experiment: give --output FOLDER"),
    ],
)
def test_what_cannot_be_measured_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        every.main(["--measure=2", *words])
    assert said in capsys.readouterr().err
