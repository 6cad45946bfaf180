"""Random modules under random specs, each beside a plain float64 loop: a few of them, or minutes or hours of them.

``MESHFOLD_FUZZ_SEED`` begins at that case again; ``MESHFOLD_FUZZ_SECONDS`` has `make test-all` hunt longer than four minutes.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from integration_tests.fuzz import judge as judging
from integration_tests.fuzz import run, shrink
from integration_tests.fuzz.cases import Case, random_case
from integration_tests.fuzz.hunt import RESULTS, Hunt, hunt, told
from integration_tests.fuzz.judge import Verdict, judge
from integration_tests.fuzz.models import build

FEW, MINUTES_S, LONG_S = 8, 240.0, 3600.0


def nothing_found(seed: int, *, seconds: float, cases: int | None = None, write: Path | None = None) -> None:
    """Judge so many cases, or as many as come in that time; every finding with how to replay it."""
    print(f"MESHFOLD_FUZZ_SEED={seed}")
    found = Hunt()
    for case, verdict in hunt(seed, found, seconds=seconds, cases=cases):
        if verdict.kind in ("finding", "invalid"):
            print(told(case, verdict), verdict.detail, sep="\n")
    print(found)
    if write is not None:
        found.write(write)
    assert not found.findings, "\n".join(told(*one) for one in found.findings)
    assert found.kinds["invalid"] <= 0.05 * found.cases + 1, "cases of which nothing was learned"


def test_some_random_cases() -> None:
    """The same ones every time, so that a change is judged by what it changes."""
    nothing_found(int(os.environ.get("MESHFOLD_FUZZ_SEED", 50_000)), seconds=LONG_S, cases=FEW)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_minutes_of_random_cases(tmp_path: Path) -> None:
    seconds = float(os.environ.get("MESHFOLD_FUZZ_SECONDS", MINUTES_S))
    seed = int(os.environ.get("MESHFOLD_FUZZ_SEED", int(time.time()) * 1000))
    nothing_found(seed, seconds=seconds, write=tmp_path / "fuzz.json")


def test_a_case_is_a_line_of_json_that_gives_it_again() -> None:
    for seed in range(300):
        case = random_case(seed)
        assert random_case(seed) == case
        assert "\n" not in case.to_json()
        assert Case.from_json(case.to_json()) == case


def test_the_plain_loop_takes_every_case() -> None:
    for seed in range(60):
        case = random_case(seed)
        trained = run.serial(case)
        assert len(trained.losses) == case.steps * case.accumulation * (1 if case.then is None else 2)
        assert any(not torch.equal(value, trained.first[name]) for name, value in trained.state.items())


PLAIN = Case(
    model=dict(
        input="ids",
        hidden=4,
        tokens=5,
        vocab=7,
        final="layer",
        blocks=[dict(kind="block", parts=[dict(kind="mlp", names="llama", wide=8)], norm="rms", residual="pre")] * 2,
        head=dict(name="lm_head"),
    ),
    spec=dict(tensor=2),
    ranks=2,
)


def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain loop that is off in one weight, one loss or one name stands for an engine that is."""
    assert judge(PLAIN).kind == "equal"
    wanted = run.serial(PLAIN)
    name = "blocks.0.mlp.up_proj.weight"
    for wrong, why in (
        (replace(wanted, state={**wanted.state, name: wanted.state[name] * (1 + 1e-7)}), "wrong weights"),
        (replace(wanted, losses=[wanted.losses[0], wanted.losses[1] + 1e-7]), "wrong loss in step 2"),
        (replace(wanted, state={**wanted.state, "other": wanted.state[name]}), "names of the state"),
        (replace(wanted, first={**wanted.first, name: wanted.first[name] + 1}), "initial weights"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(run, "serial", lambda case, first, wrong=wrong: wrong)
            found = judge(PLAIN)
        assert (found.kind, found.why[: len(why)]) == ("finding", why)


def test_a_refusal_has_to_name_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    many = dict(pipeline=dict(size=2, schedule="interleaved", chunks=3))
    case = replace(PLAIN, spec=many)
    found = judge(case)
    assert found.kind == "refused"
    assert "pipeline=2 with chunks=1" in found.why
    assert found.sort == "~ blocks cannot be cut into ~ stages: each stage"
    monkeypatch.setattr(judging, "REMEDY", re.compile("no such word"))
    assert judge(case).why.startswith("refused without a remedy")


def test_a_small_difference_is_rounding_only_where_the_plain_loop_multiplies_it() -> None:
    attention = dict(kind="attention", heads=4, how="sdpa", causal=True, names="bert", known="head_dim", merge="hidden")
    block = dict(kind="block", parts=[attention], norm="none", residual="post")
    model = dict(
        input="ids",
        hidden=8,
        tokens=6,
        vocab=12,
        scaled=True,
        blocks=[block] * 4,
        container="ModuleList",
        skip=True,
    )
    diverging = replace(PLAIN, model={**model, "head": dict(name="head")}, steps=4, rows=2, ignored=0.3, seed=416)
    for case, relative, is_rounding in (
        (diverging, 1e-8, True),
        (diverging, 1e-4, False),
        (PLAIN, 1e-8, False),
    ):
        wanted = run.serial(case)
        state = {
            name: value * (1 + relative) if value.is_floating_point() else value for name, value in wanted.state.items()
        }
        found = [replace(wanted, state=state)]
        assert judging.compare(case, found, wanted, 0)
        assert judging.is_rounding(case, found, wanted, 0) == is_rounding


def test_an_error_of_python_is_a_finding() -> None:
    case = replace(
        PLAIN,
        optimizer=dict(name="sgd", lr=0.5),
        model={**PLAIN.model, "blocks": [dict(kind="step", step="none")]},
    )
    assert judge(case).kind == "invalid"  # the plain loop has it too
    late = replace(PLAIN, clip=dict(clip_grad_norm="much"))
    assert judge(late).kind == "invalid"


def _parts(of: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All blocks of a model and all that is in them."""
    for one in (*of.get("blocks", ()), *of.get("parts", ()), *of.get("inner", ())):
        yield one
        yield from _parts(one)


def test_a_finding_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a case that fails wherever a block has an MLP, the MLP is left."""

    def fails(case: Case) -> Verdict:
        build(case.model, 0)
        wrong = any(part["kind"] == "mlp" for part in _parts(case.model))
        return Verdict(kind="finding" if wrong else "equal", why="wrong loss in step 1")

    monkeypatch.setattr(shrink, "judge", fails)
    big = replace(
        PLAIN,
        accumulation=3,
        clip=dict(clip_grad_norm=0.1),
        spec=dict(tensor=2, zero=dict(stage=3, placement="cpu")),
    )
    small, verdict = shrink.shrink(big, fails(big))
    assert verdict.kind == "finding"
    assert small.spec == dict(tensor=2)
    assert (small.accumulation, small.clip) == (1, {})
    assert small.model["blocks"] == [dict(kind="block", parts=[dict(kind="mlp", names="llama", wide=8)])]


def test_the_committed_result_has_no_finding() -> None:
    found = json.loads(RESULTS.read_text())
    assert found["findings"] == []
    kinds = found["kinds"]
    assert found["cases"] == kinds["equal"] + kinds["refused"] >= 5000
    assert kinds["invalid"] <= 0.01 * found["cases"]
    assert "/integration_tests/" not in RESULTS.read_text()
