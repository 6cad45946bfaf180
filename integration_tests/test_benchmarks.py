"""Benchmarks whose contestants are made of our models' parts run: a part that has changed would be a row "could not run"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def measured(area: str, out: Path, *words: str) -> dict[str, object]:
    """What `meshfold bench AREA --tiny WORDS` writes."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{area}.py"), "--tiny", *words, "--out", str(out)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found: dict[str, object] = json.loads(out.read_text())
    return found


def test_pipelines_beside_torchs(tmp_path: Path) -> None:
    names = ["1f1b", "torch 1f1b", "torch interleaved"]
    words = (
        "--ranks",
        "2",
        "--microbatches",
        "4",
        "--rounds",
        "1",
        "--layers",
        "4",
        "--only",
        ",".join(names),
    )
    found = measured("pipeline", tmp_path / "pipeline.json", *words)
    case = found["cases"]["4"]  # type: ignore[index]
    assert found["notes"] == {}
    assert set(case["milliseconds"]) == set(names)
    assert max(case["norm_error"].values()) < 1e-5


def test_the_longest_sequence(tmp_path: Path) -> None:
    found = measured("longest_sequence", tmp_path / "longest.json", "--counts", "1", "--tries", "1")
    one = found["counts"]["1"]  # type: ignore[index]
    assert one["line"]["foretold"] > 0 and one["attempts"]
