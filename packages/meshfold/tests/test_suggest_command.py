"""``meshfold suggest``: its table, the line to paste, one spec explained, the picture, and refusals in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold import planner
from meshfold.cli import main
from meshfold.cli.arguments import read_parallel
from meshfold.mesh import ParallelSpec, SpecError

SMALL = ["suggest", "--model", "gpt-tiny", "--machine", "h100", "--batch-size", "4"]


def test_the_best_specs_are_printed_with_the_line_to_paste(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "options.svg"
    assert main([*SMALL, "--explain", "zero.stage=3", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "4 sequences of 128 tokens, bf16, on 1 rank of h100: " in printed
    assert "tokens/s" in printed and "parallel = dict(" in printed and "--parallel" in printed
    assert "zero" in printed and "it fits" in printed and "together, by the whole plan" in printed
    assert "Pareto front" in picture.read_text()
    [line] = [line for line in printed.splitlines() if line.startswith("parallel = ")]
    assert ParallelSpec.parse(read_parallel([line.removeprefix("parallel = ")]), 1).world_size == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--machine", "h100x9"], "there is no machine 'h100x9'"),
        (["--model", "gpt-tony"], "there is no model 'gpt-tony'"),
        (
            ["--ranks", "5", "--machine", "h100x8", "--batch-size", "3", "--seq-len", "101"],
            "no spec divides a batch of 3",
        ),
    ],
)
def test_refusals_are_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *words]) == 1
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_the_search_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle threads wait for work by spinning, which took a tenth of the CPU time."""
    seen: list[int] = []

    def ended(*_: Any, **__: Any) -> None:
        seen.append(torch.get_num_threads())
        raise SpecError("enough seen")

    before = torch.get_num_threads()
    monkeypatch.setattr(planner, "suggest", ended)
    try:
        torch.set_num_threads(2)
        assert main(SMALL) == 1
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_numbers_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["options"][0]["seconds"] > 0 and found["considered"] > 10
