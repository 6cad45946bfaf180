"""The benchmark of denoisers: its cases, its verdicts, and a small run of every contestant."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.diffusion.cases import CASES, GIB, batch_of, model_of, tiny
from benchmarks.diffusion.report import of_case, of_limits
from meshfold.cli import main

if importlib.util.find_spec("diffusers") is None:
    pytest.skip("diffusers is not installed: pip install meshfold-huggingface[diffusers]", allow_module_level=True)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("sd2", 0.8659), ("dit-xl", 0.7498), pytest.param("flux-12b", 11.901, marks=pytest.mark.slow)],
)
def test_a_case_has_the_published_size(name: str, billions: float) -> None:
    """DiT-XL/2 has 675 million in its paper; in diffusers each of 28 blocks has embedders of its own."""
    case = CASES[name]
    with torch.device("meta"):
        model = model_of(case.kind, case.config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("name", ["sd2", "dit-xl", "flux-12b"])
def test_a_batch_fits_its_model(name: str) -> None:
    case = tiny(CASES[name])
    model = model_of(case.kind, case.config)
    batch = batch_of(model, case.rows, case.tokens, seed=1)
    target = batch.pop("target")
    assert model(**batch).sample.shape == target.shape


def run(seconds: float, peak: float = 0.0) -> dict[str, Any]:
    return dict(seconds=[seconds] * 3, peak_bytes=int(peak * GIB), losses=[1.0, 0.9], watts=500.0, mhz=1500.0)


def case_of(name: str, runs: dict[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    case = CASES[name]
    work = dict(ranks=case.ranks, rows=case.rows, dtype="bfloat16", recompute=case.recompute, limit=case.limit)
    work["micro_steps"] = case.micro_steps
    return dict(
        about=case.about,
        work={**work, "config": dict(case.config), **changes},
        runs={who: [found] for who, found in runs.items()},
    )


def test_verdicts() -> None:
    free = case_of(
        "sd2", {"ours": run(0.2), "ours, compiled": run(0.1), "diffusers": run(0.3), "diffusers, compiled": run(0.12)}
    )
    lines = "\n".join(of_case("sd2", free))
    assert "our best (ours, compiled) against diffusers' best (diffusers, compiled): 1.200 (bar 1.1): met" in lines
    assert "| ours, compiled | 0.1000 | 160.0 | 1.000 |" in lines
    assert "| 3.1 | 1500 |" in lines  # 500 W · 0.1 s / 16 images
    small = "\n".join(of_case("sd2", case_of("sd2", {"ours": run(0.1), "diffusers": run(0.2)}, rows=4)))
    assert small.rstrip().endswith("best (diffusers): 2.000")  # another work than the bar's
    capped = case_of("sd2-11", {"ours": run(0.15, peak=10.5)})
    assert "- trains under 11 GiB: 10.50: met" in "\n".join(of_case("sd2-11", capped))
    assert of_limits({"sd2": free, "sd2-11": capped}) == [
        "- speed under 11 GiB by that without a limit, Adam's moments in 32 bits (ours): 0.667 (bar 0.8): **not met**"
    ]
    both = case_of("sd2-11", {"ours": run(0.15), "ours, regime C, compiled, captured": run(0.12)})
    exact, fewer = of_limits({"sd2": free, "sd2-11": both})  # moments of fewer bits have a verdict of their own
    assert "in 32 bits (ours): 0.667" in exact
    assert "in 16 or 8 bits (ours, regime C, compiled, captured): 0.833 (bar 0.8): met" in fewer
    failed = case_of("sd2-5.6", {"ours": dict(error="out of memory")})
    assert "| ours | – | – | – | – | – | – | – | – | out of memory |" in "\n".join(of_case("sd2-5.6", failed))


def test_table_says_how_long_a_contestant_compiled_and_who_did_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each result is written when its contestant ends; seconds for compiling are no part of those for steps."""
    given: list[float] = []

    def of_contestant(worker: Path, job: dict[str, Any], timeout: float, why: Any) -> dict[str, Any]:
        given.append(timeout)
        if len(given) == 2:  # the first contestant's table is there already
            assert "| ours, compiled | 0.1000 |" in out.with_suffix(".md").read_text()
        return (
            dict(run(0.1), first_step_s=41.0)
            if job["contestant"] == "ours, compiled"
            else dict(error="stopped after 9 s")
        )

    out = tmp_path / "found.json"
    monkeypatch.setattr("benchmarks.diffusion.run.run_contestant", of_contestant)
    who = ["ours, compiled", "diffusers, compiled", "diffusers"]
    assert main(["bench", "diffusion", "--out", str(out), "--timeout", "9", "--compile-s", "30", "--only", *who]) == 0
    assert given == [39.0, 39.0, 9.0]
    lines = out.with_suffix(".md").read_text()
    assert "| 41 | 1.000 → 0.900 |" in lines
    assert "| diffusers, compiled | – | – | – | – | – | – | – | – | did not compile in 39 s |" in lines
    assert "| diffusers | – | – | – | – | – | – | – | – | stopped after 9 s |" in lines
    assert "did not compile in 39 s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)  # contestants are compiled, each in a process of its own
@pytest.mark.parametrize("name", CASES)
def test_every_contestant_trains_a_small_model_to_the_same_loss(name: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["bench", "diffusion", "--tiny", "--timeout", "600", "--out", str(out), "--case", name]
    assert main([*words, "--limit", "0.5"] if CASES[name].limit else words) == 0
    case = json.loads(out.read_text())["cases"][name]
    losses = [run["losses"] for runs in case["runs"].values() for run in runs]
    assert len(losses) == len(CASES[name].contestants)
    steps = min(len(each) for each in losses)  # whose first step compiles for long has one step less of warm-up
    assert steps >= 3
    for each in losses:
        assert each[:steps] == pytest.approx(losses[0][:steps], rel=1e-3)
    if any("ours" not in who for who in case["runs"]):
        assert "our best" in out.with_suffix(".md").read_text()
