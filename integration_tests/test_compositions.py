"""Data parallelism × every tensor mode, ZeRO beside them: one process's loss curve and weights, replicas of the same bits."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from integration_tests import composition
from integration_tests.composition import CLIP, MODELS, Run, train
from integration_tests.house import ROOT
from meshfold.mesh.testing import run_on_ranks

Spec = dict[str, Any]


def tensor(mode: str, **settings: Any) -> Spec:
    return dict(tensor=dict(mode=mode, **settings))


MEGATRON: Spec = dict(sequence=dict(mode="megatron"))
ZERO: Spec = dict(zero=dict(stage=3))

# On 4 ranks, each with the models that it is tried with in the covering selection.
ON_4: list[tuple[Spec, tuple[str, ...]]] = [
    (dict(data=4), ("gpt",)),
    (dict(data=2, tensor=2), ("llama",)),
    (dict(data=2, tensor=2, **MEGATRON), ("gpt",)),
    (dict(tensor=4), ("gpt",)),
    (dict(tensor=4, **MEGATRON), ("llama",)),
    (tensor("1d", size=4, overlap="ring"), ()),
    (tensor("2d", size=4), ("llama",)),
    (tensor("2d", size=4, overlap="stream"), ("gpt",)),
    (tensor("2d", grid=(1, 4)), ()),
    (tensor("2d", grid=(4, 1)), ()),
    (dict(data=2, **tensor("2d", grid=(2, 1))), ("gpt",)),
    (dict(data=2, **tensor("2d", grid=(1, 2))), ()),
    (tensor("2.5d", size=4, depth=1), ()),
    (tensor("2.5d", depth=2, grid=(1, 2)), ("llama",)),
    (tensor("2.5d", size=4, depth=4), ()),
    (dict(data=2, **tensor("2.5d", size=2, depth=2)), ()),
    (tensor("3d", grid=(2, 2, 1)), ("gpt",)),
    (tensor("3d", grid=(2, 1, 2)), ()),
    (tensor("3d", grid=(1, 2, 2)), ()),
    (tensor("3d", grid=(4, 1, 1)), ()),
    (dict(data=2, **tensor("3d", grid=(1, 1, 2))), ()),
    (dict(data=2, **tensor("3d", grid=(1, 2, 1))), ()),
    (dict(data=4, zero=dict(stage=1)), ()),
    (dict(data=2, tensor=2, **MEGATRON, zero=dict(stage=2, placement="cpu")), ("llama",)),
    (dict(data=2, **tensor("2d", grid=(2, 1)), **ZERO), ()),
]
ON_8: list[tuple[Spec, tuple[str, ...]]] = [
    (dict(data=8), ()),
    (dict(data=4, tensor=2), ()),
    (dict(data=2, tensor=4), ()),
    (dict(tensor=8), ()),
    (dict(data=2, tensor=4, **MEGATRON), ("llama",)),
    (dict(data=2, **tensor("2d", size=4)), ("gpt",)),
    (tensor("2d", grid=(2, 4)), ()),
    (tensor("2d", grid=(4, 2)), ()),
    (tensor("2.5d", size=8, depth=2), ("gpt",)),
    (tensor("2.5d", size=8, depth=2, overlap="stream"), ()),
    (dict(data=2, **tensor("2.5d", depth=2, grid=(2, 1))), ()),
    (tensor("3d", size=8), ("gpt",)),
    (tensor("3d", grid=(4, 1, 2)), ()),
    (dict(data=2, **tensor("3d", grid=(2, 2, 1))), ("llama",)),
    (dict(data=4, **tensor("3d", grid=(1, 1, 2))), ()),
    (dict(data=2, **tensor("2d", size=4), **ZERO), ("gpt",)),
    (dict(data=2, **tensor("2.5d", size=4, depth=1), **ZERO), ()),
    (dict(data=2, **tensor("3d", grid=(2, 2, 1)), **ZERO), ()),
]


def cases(specs: list[tuple[Spec, tuple[str, ...]]]) -> list[Any]:
    """Every spec with every model; what is not in the covering selection is slow."""
    return [
        pytest.param(spec, model, marks=() if model in chosen else pytest.mark.slow, id=f"{model}-{describe(spec)}")
        for spec, chosen in specs
        for model in MODELS
    ]  # fmt: skip


def describe(spec: Spec) -> str:
    return json.dumps(spec).translate(str.maketrans("", "", '"{}[]() ')).replace("tensor:mode:", "")


@functools.cache
def alone(model: str, precision: str = "fp32") -> Run:
    """The same training in one process."""
    return train(model, {}, precision)


def check(found: Run, model: str, tolerance: float = 1e-5) -> None:
    wanted = alone(model)
    assert all(norm > CLIP for norm in wanted.norms), "clipping has to be at work"
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=10 * tolerance)
    assert list(found.state) == list(wanted.state)
    for name, value in wanted.state.items():
        assert found.state[name].dtype == value.dtype
        torch.testing.assert_close(
            found.state[name],
            value,
            rtol=tolerance,
            atol=tolerance * float(value.abs().max()),
            msg=functools.partial("{}: {}".format, name),
        )
    assert found.differing == []


def check_on_rank(spec: Spec, model: str) -> Run:
    return train(model, spec)


def agree(runs: list[Run]) -> Run:
    """The first rank's run: all ranks must have found the same, to the bit."""
    for run in runs[1:]:
        assert (run.losses, run.norms, run.differing) == (runs[0].losses, runs[0].norms, runs[0].differing)
        assert all(torch.equal(value, runs[0].state[name]) for name, value in run.state.items())
    return runs[0]


@pytest.mark.parametrize(("spec", "model"), cases(ON_4))
def test_four_ranks_train_as_one_process(spec: Spec, model: str) -> None:
    check(agree(run_on_ranks(4, check_on_rank, spec, model)), model)


@pytest.mark.parametrize(("spec", "model"), cases(ON_8))
def test_eight_ranks_train_as_one_process(spec: Spec, model: str) -> None:
    check(agree(run_on_ranks(8, check_on_rank, spec, model)), model)


def check_bf16_on_rank(cases: list[tuple[Spec, str]]) -> list[Run]:
    return [train(model, spec, "bf16") for spec, model in cases]


@pytest.mark.parametrize(
    ("ranks", "specs"),
    [
        (
            4,
            [
                (dict(data=2, tensor=2, **MEGATRON), "gpt"),
                (tensor("2d", size=4), "llama"),
                (tensor("3d", grid=(2, 2, 1)), "llama"),
                (dict(data=2, tensor=2, **ZERO), "gpt"),
            ],
        ),
        (8, [(tensor("2.5d", size=8, depth=2), "llama"), (dict(data=2, **tensor("2d", size=4)), "gpt")]),
    ],
    ids=["4", "8"],
)
def test_bf16_trains_near_float32_and_replicas_keep_the_same_bits(
    ranks: int, specs: list[tuple[Spec, str]]
) -> None:
    per_rank = run_on_ranks(ranks, check_bf16_on_rank, specs)
    for (spec, model), runs in zip(specs, zip(*per_rank, strict=True), strict=True):
        run = agree(list(runs))
        assert run.differing == [], spec
        assert run.losses == pytest.approx(alone(model).losses, rel=0.02), spec
        assert all(math.isfinite(norm) and norm > 0 for norm in run.norms), spec
        assert all(value.dtype == torch.float32 for value in run.state.values()), (
            "true weights are the masters"
        )


THROUGH_TORCHRUN: list[Any] = [
    pytest.param(dict(data=2, **tensor("2d", grid=(2, 1))), "gpt", id="data × 2d"),
    pytest.param(dict(data=4), "llama", id="data", marks=pytest.mark.slow),
    pytest.param(dict(tensor=4, **MEGATRON), "gpt", id="megatron", marks=pytest.mark.slow),
    pytest.param(tensor("2.5d", depth=2, grid=(2, 1)), "llama", id="2.5d", marks=pytest.mark.slow),
    pytest.param(tensor("3d", grid=(2, 2, 1)), "gpt", id="3d", marks=pytest.mark.slow),
]


@pytest.mark.slow  # packages/engine/tests/test_cli.py trains under torchrun too
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
