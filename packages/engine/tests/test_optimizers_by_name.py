"""Optimizers of meshfold.optimizers by name: ten steps under every kind of spec equal those of one process, in float64."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from meshfold.mesh import SpecError, record
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from pipeline_cases import MODELS, Case, batches, compare, engine_of, relay

STEPS = 10
SMALL: dict[str, dict[str, Any]] = {
    # A large epsilon: else gradients that are zero but for rounding, such as those of key biases, count as much as others.
    "lamb": dict(name="lamb", lr=0.02, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1),
    "lars": dict(name="lars", lr=0.5, trust_coeff=0.02, weight_decay=0.1, no_decay="norms_and_biases"),
    "lion": dict(name="lion", lr=1e-3, weight_decay=0.1),
    "adafactor": dict(name="adafactor", lr=0.01),
    "adafactor_hf": dict(name="adafactor_hf", beta1=0.9),
    "came": dict(name="came", lr=1e-3),
    "muon": dict(name="muon", lr=0.02, adamw_lr=3e-3, adamw_eps=1e-4, ns_dtype="same"),
}
TENSOR: list[dict[str, Any]] = [
    dict(tensor=dict(mode="1d", size=2)),
    dict(tensor=dict(mode="1d", size=4)),
    dict(tensor=dict(mode="2d", size=4)),
]
TENSOR_ZERO: list[dict[str, Any]] = [dict(tensor=dict(mode="1d", size=2), zero=dict(stage=2))]
ZERO: list[dict[str, Any]] = [dict(zero=dict(stage=stage)) for stage in (1, 2, 3)]
HOST: list[dict[str, Any]] = [dict(zero=dict(stage=3, placement="cpu"))]
PIPELINE: list[dict[str, Any]] = [dict(pipeline=2), dict(pipeline=2, zero=dict(stage=1))]
PIPELINE_TENSOR: list[dict[str, Any]] = [dict(pipeline=2, tensor=dict(mode="1d", size=2))]


def cases(name: str, model: str, specs: list[dict[str, Any]], **settings: Any) -> list[Case]:
    return [(spec, model, {"optimizer": SMALL[name], **settings}) for spec in specs]


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_norms(name: str) -> None:
    """Norms of whole tensors, also of those that some ranks share and of which a rank has a few elements."""
    specs = [*TENSOR, *TENSOR_ZERO, *ZERO, *HOST, *PIPELINE, *PIPELINE_TENSOR]
    compare(4, cases(name, "llama", specs), batches(STEPS))
    compare(4, cases(name, "tied", [TENSOR[2], ZERO[2], *PIPELINE]), batches(STEPS))


def test_norms_in_cubes_and_over_sequences() -> None:
    compare(8, cases("lamb", "gpt", [dict(tensor=dict(mode="3d", size=8))]), batches(STEPS))
    specs: list[dict[str, Any]] = [dict(sequence=dict(mode="ring", size=2), zero=dict(stage=zero)) for zero in (1, 3)]
    compare(4, cases("lars", "llama", specs), batches(STEPS))


def test_elements() -> None:
    specs = [TENSOR[2], *TENSOR_ZERO, ZERO[2], *HOST, PIPELINE[1]]
    compare(4, cases("lion", "llama", specs), batches(STEPS))


def test_muon_by_roles() -> None:
    compare(4, cases("muon", "llama", [{}, *ZERO, *HOST]), batches(STEPS))
    compare(4, cases("muon", "tied", [ZERO[2]]), batches(STEPS))
    with engine_of(dict(zero=dict(stage=1)), "llama", optimizer=SMALL["muon"]) as engine:
        assert engine.optimizer is not None
        groups = {group["role"]: len(group["params"]) for group in engine.optimizer.param_groups}
        assert groups == {"matrices": 4 * 4, "embeddings": 1, "head": 1, "norms_and_biases": 4 * 2 + 1}
        assert engine.optimizer.param_groups[2]["lr"] == 3e-3
    run_on_ranks(2, muon_in_stages)


def muon_in_stages() -> None:
    with pytest.raises(SpecError, match="leave pipeline out"):
        engine_of(dict(pipeline=2), "llama", optimizer=SMALL["muon"])


@pytest.mark.parametrize("name", ["adafactor", "adafactor_hf", "came"])
def test_matrices(name: str) -> None:
    compare(4, cases(name, "llama", [{}, ZERO[0], ZERO[2], *PIPELINE]), batches(STEPS))


Sums = list[list[tuple[str, tuple[str, ...], int]]]


def norm_collectives(specs: list[dict[str, Any]]) -> Sums:
    """Return the collectives that two steps send with LAMB and not with Lion: kind, axes and bytes."""
    found = []
    for spec in specs:
        counts = []
        for name in ("lamb", "lion"):
            with engine_of(spec, "llama", optimizer=SMALL[name]) as engine:
                engine.train_step(engine.shard_batch(batches(1)[0]))
                with record() as log:
                    for batch in batches(2):
                        engine.train_step(engine.shard_batch(batch))
                counts.append(Counter((one.kind, one.axes, one.block_bytes) for one in log.entries))
        assert not counts[1] - counts[0]
        found.append(list((counts[0] - counts[1]).elements()))
    return found


def test_all_norms_are_summed_in_one_collective_a_step() -> None:
    """Two numbers a tensor in one all-reduce; none where every rank has whole tensors."""
    size = 2 * 8 * len(list(MODELS["llama"]().parameters()))
    specs: list[dict[str, Any]] = [dict(data=4), TENSOR[0], TENSOR[2], TENSOR_ZERO[0], ZERO[2]]
    axes = [None, ("tensor",), ("row", "col"), ("data", "tensor"), ("data",)]
    for found in run_on_ranks(4, norm_collectives, specs):
        for sent, over in zip(found, axes, strict=True):
            assert sent == ([] if over is None else 2 * [("all_reduce", over, size)])


def leg(
    name: str, parallel: dict[str, Any], load: str, save: str, given: list[dict[str, Tensor]]
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    with engine_of(parallel, "llama", optimizer=SMALL[name]) as engine:
        if load:
            engine.load(load)
        loaded = engine.full_state_dict()
        losses = [engine.train_step(engine.shard_batch(batch)) for batch in given]
        engine.save(save)
        return losses, loaded, engine.full_state_dict()


def lamb_leg(*arguments: Any) -> Any:
    return leg("lamb", *arguments)


def lars_leg(*arguments: Any) -> Any:
    return leg("lars", *arguments)


def adafactor_leg(*arguments: Any) -> Any:
    return leg("adafactor_hf", *arguments)


def came_leg(*arguments: Any) -> Any:
    return leg("came", *arguments)


@pytest.mark.parametrize("one", [lamb_leg, lars_leg])
def test_state_of_zero_3_goes_on_under_tensor_parallelism(one: Callable[..., Any], tmp_path: Path) -> None:
    legs: list[tuple[int, dict[str, Any]]] = [(4, ZERO[2]), (2, TENSOR[0]), (4, PIPELINE[1]), (1, {})]
    relay(legs, one, tmp_path)


@pytest.mark.parametrize("one", [adafactor_leg, came_leg])
def test_state_of_owners_goes_on_elsewhere(one: Callable[..., Any], tmp_path: Path) -> None:
    relay([(4, ZERO[2]), (2, PIPELINE[0]), (1, {})], one, tmp_path)


def muon_leg(*arguments: Any) -> Any:
    return leg("muon", *arguments)


def test_state_of_muon_goes_on_without_zero(tmp_path: Path) -> None:
    relay([(4, ZERO[2]), (2, {}), (1, ZERO[0])], muon_leg, tmp_path)


@pytest.mark.parametrize("name", ["adafactor", "adafactor_hf", "came", "muon"])
def test_whole_matrices_and_tensor_parallelism_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"leave the entry tensor out.*Known: adamw"):
        engine_of(dict(tensor=dict(mode="1d", size=1)), "llama", optimizer=SMALL[name])


def test_wrong_settings_are_refused_by_value() -> None:
    with pytest.raises(SpecError, match=r"betas=\(0.9, 1.5\)"):
        engine_of({}, "llama", optimizer=dict(name="lamb", betas=(0.9, 1.5)))
    with pytest.raises(SpecError, match="trust_coeff=-1"):
        engine_of({}, "llama", optimizer=dict(name="lars", trust_coeff=-1))
    with pytest.raises(SpecError, match="Did you mean 'lamb'"):
        engine_of({}, "llama", optimizer=dict(name="lambb"))
