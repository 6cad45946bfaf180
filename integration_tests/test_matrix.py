"""Every entry of the spec beside every other: one process's loss curve and weights, replicas of the same bits.

Each member of the matrix trains five steps, and its checkpoint goes on under the next member's spec. ``make test-all``
takes the long selection; with ``--matrix-results FILE`` what was found is written down. ``make test`` takes the short
selection, and three steps.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from integration_tests import composition
from integration_tests.composition import (
    ACCUMULATION,
    CLIP,
    FEW_STEPS,
    MORE,
    ONE_MORE,
    STEPS,
    Run,
    train,
    train_and_go_on,
)
from integration_tests.house import ROOT
from integration_tests.matrix import DIMENSIONS, OFF, Member, long, mixtures, short
from integration_tests.matrix import members as members_of
from integration_tests.results import BEGIN, END, PAGE, Found, read, summary, write
from meshfold.mesh.testing import run_on_ranks

Spec = dict[str, Any]
TOLERANCE = 1e-5  # relative, in float32


def members() -> list[Any]:
    """The short selection with few steps, then all that is in either with all of them."""
    quick = successors(short())
    more = successors([member for member in long() if member not in short()])
    return [
        *(pytest.param(*pair, FEW_STEPS, ONE_MORE, id=pair[0].name) for pair in quick),
        *(
            pytest.param(*pair, STEPS, MORE, id=f"{pair[0].name}, {STEPS} steps", marks=pytest.mark.slow)
            for pair in quick + more
        ),
    ]


def successors(chosen: Sequence[Member]) -> list[tuple[Member, Member]]:
    """Each member with the next one on as many ranks."""
    by_ranks: dict[int, list[Member]] = {}
    for member in chosen:
        by_ranks.setdefault(member.ranks, []).append(member)
    return [pair for some in by_ranks.values() for pair in zip(some, [*some[1:], some[0]], strict=True)]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[list[Found]]:
    """What the members of this run gave; written down at the end where it was asked for."""
    collected: list[Found] = []
    yield collected
    path = request.config.getoption("--matrix-results")
    if path and collected:
        write(collected, Path(path).absolute())


def tensor(mode: str, **settings: Any) -> Spec:
    return dict(tensor=dict(mode=mode, **settings))


MEGATRON: Spec = dict(sequence=dict(mode="megatron"))
ZERO: Spec = dict(zero=dict(stage=3))


@functools.cache
def alone(model: str, steps: int = STEPS) -> Run:
    """The same training in one process."""
    return train(model, {}, steps=steps)


def check(found: Run, model: str, steps: int = STEPS, done: int = 0) -> tuple[float, float]:
    """That it is the serial run, or the end of it; the largest differences of losses and of weights, relative."""
    wanted = alone(model, done + steps)
    assert all(norm > CLIP for norm in wanted.norms), "clipping has to be at work"
    losses = wanted.losses[done * ACCUMULATION :]
    assert found.losses == pytest.approx(losses, rel=TOLERANCE)
    assert found.norms == pytest.approx(wanted.norms[done:], rel=10 * TOLERANCE)
    assert list(found.state) == list(wanted.state)
    largest = 0.0
    for name, value in wanted.state.items():
        assert found.state[name].dtype == value.dtype
        off = float((found.state[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        assert off <= TOLERANCE, f"{name}: {off:.1e} of its largest element"
        largest = max(largest, off)
    assert found.differing == []
    return max(abs(a / b - 1) for a, b in zip(found.losses, losses, strict=True)), largest


def agree(runs: list[Run]) -> Run:
    """The first rank's run: all ranks must have found the same, to the bit."""
    for run in runs[1:]:
        assert (run.losses, run.norms, run.differing) == (runs[0].losses, runs[0].norms, runs[0].differing)
        assert all(torch.equal(value, runs[0].state[name]) for name, value in run.state.items())
    return runs[0]


@pytest.mark.few(2)
@pytest.mark.parametrize(("member", "following", "steps", "more"), members())
def test_it_trains_as_one_process_and_goes_on_under_another_spec(
    member: Member, following: Member, steps: int, more: int, tmp_path: Path, found: list[Found]
) -> None:
    start = time.perf_counter()
    spec, then, folder = member.spec, following.spec, str(tmp_path / "checkpoint")
    runs = run_on_ranks(member.ranks, train_and_go_on, member.model, spec, then, folder, steps, more)
    loss, weights = check(agree([first for first, _ in runs]), member.model, steps)
    check(agree([second for _, second in runs]), member.model, more, done=steps)
    seconds = time.perf_counter() - start
    if steps == STEPS:
        found.append(Found(member=member, following=following, loss_error=loss, weight_error=weights, seconds=seconds))


def test_the_page_shows_what_was_found() -> None:
    """By the committed results, which are of members that are chosen still."""
    found = read()
    assert set(found) <= {*short(), *long()}
    assert set(short()) <= set(found)
    shown = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert shown.strip() == summary(found), "run python -m integration_tests.results"


def test_what_is_chosen_has_every_pair() -> None:
    pairs = {pair for ranks in (4, 8) for member in members_of(ranks) for pair in member.combinations(2)}
    assert pairs == {pair for member in long() for pair in member.combinations(2)}
    dimensions = {frozenset(d for d, _ in pair) for pair in pairs}
    alone = [frozenset(d for d, v in member.at.items() if v != OFF) for member in short()]
    assert {pair for pair in dimensions if "model" not in pair} <= set(alone)


def mixture_members() -> list[Any]:
    """Two mixtures with few steps, then all of them, on four ranks and on eight."""
    every = [*successors(mixtures(4)), *successors(mixtures(8))]
    return [
        *(pytest.param(*pair, FEW_STEPS, ONE_MORE, id=pair[0].name) for pair in (every[0], every[12])),
        *(
            pytest.param(*pair, STEPS, MORE, id=f"{pair[0].name}, {STEPS} steps", marks=pytest.mark.slow)
            for pair in every
        ),
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize(("member", "following", "steps", "more"), mixture_members())
def test_a_mixture_trains_as_one_process_and_goes_on_with_experts_on_other_ranks(
    member: Member, following: Member, steps: int, more: int, tmp_path: Path
) -> None:
    spec, then, folder = member.spec, following.spec, str(tmp_path / "checkpoint")
    runs = run_on_ranks(member.ranks, train_and_go_on, member.model, spec, then, folder, steps, more)
    check(agree([first for first, _ in runs]), member.model, steps)
    check(agree([second for _, second in runs]), member.model, more, done=steps)


def test_mixtures_have_experts_beside_every_value_that_has_room() -> None:
    chosen = {(member.experts, d, v) for ranks in (4, 8) for member in mixtures(ranks) for d, v in member.at.items()}
    for dimension, values in DIMENSIONS.items():
        for value in values:
            assert (2, dimension, value) in chosen or (4, dimension, value) in chosen, (dimension, value)


def check_bf16_on_rank(cases: list[tuple[Spec, str]]) -> list[Run]:
    return [train(model, spec, "bf16", steps=2) for spec, model in cases]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "specs"),
    [
        (
            4,
            [
                (tensor("3d", grid=(2, 2, 1)), "llama"),
                (dict(data=2, tensor=2, **ZERO), "gpt"),
            ],
        ),
        pytest.param(
            4,
            [(dict(data=2, tensor=2, **MEGATRON), "gpt"), (tensor("2d", size=4), "llama")],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            8,
            [(tensor("2.5d", size=8, depth=2), "llama"), (dict(data=2, **tensor("2d", size=4)), "gpt")],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["4", "4, others", "8"],
)
def test_bf16_trains_near_float32_and_replicas_keep_the_same_bits(ranks: int, specs: list[tuple[Spec, str]]) -> None:
    per_rank = run_on_ranks(ranks, check_bf16_on_rank, specs)
    for (spec, model), runs in zip(specs, zip(*per_rank, strict=True), strict=True):
        run = agree(list(runs))
        assert run.differing == [], spec
        assert run.losses == pytest.approx(alone(model, 2).losses, rel=0.02), spec
        assert all(math.isfinite(norm) and norm > 0 for norm in run.norms), spec
        assert all(value.dtype == torch.float32 for value in run.state.values()), "masters are float32"


THROUGH_TORCHRUN: list[Any] = [
    pytest.param(dict(data=2, **tensor("2d", grid=(2, 1))), "gpt", id="data × 2d"),
    pytest.param(dict(data=4), "llama", id="data", marks=pytest.mark.slow),
    pytest.param(dict(tensor=4, **MEGATRON), "gpt", id="megatron", marks=pytest.mark.slow),
    pytest.param(tensor("2.5d", depth=2, grid=(2, 1)), "llama", id="2.5d", marks=pytest.mark.slow),
    pytest.param(tensor("3d", grid=(2, 2, 1)), "gpt", id="3d", marks=pytest.mark.slow),
]


@pytest.mark.slow  # packages/meshfold/tests/test_cli.py trains under torchrun too
@pytest.mark.parametrize(("spec", "model"), THROUGH_TORCHRUN)
def test_torchrun_starts_the_same_training(spec: Spec, model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    script = [composition.__file__, model, json.dumps(spec), str(tmp_path)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1")
    done = subprocess.run(
        [*command, *script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    check(agree([Run(**torch.load(tmp_path / f"{rank}.pt")) for rank in range(4)]), model)
