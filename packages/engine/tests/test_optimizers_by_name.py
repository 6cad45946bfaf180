"""Optimizers of meshfold.optimizers by name: ten steps under every kind of spec equal those of one process, in float64."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.kernels import LAYERWISE, STEP_KERNELS
from meshfold.mesh import SpecError, all_reduce, record
from meshfold.mesh.testing import run_on_ranks
from meshfold.optimizers import Adafactor, AdafactorHF, Came, Lamb, Lars, Lion, Muon, muon

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
import expert_cases
from pipeline_cases import MODELS, Case, batches, compare, engine_of, optimizer_leg, relay, steps_alone

STEPS, FEW = 10, 4  # of the tests that have every spec, and of those that have a diagonal
SMALL: dict[str, dict[str, Any]] = {
    # A large epsilon: else gradients that are zero but for rounding, such as those of key biases, count as much as others.
    "lamb": dict(name="lamb", lr=0.02, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1),
    "lars": dict(name="lars", lr=0.5, trust_coeff=0.02, weight_decay=0.1, no_decay="norms_and_biases"),
    "lion": dict(name="lion", lr=1e-3, weight_decay=0.1),
    "adafactor": dict(name="adafactor", lr=0.01),
    "adafactor_hf": dict(name="adafactor_hf", beta1=0.9),
    "came": dict(name="came", lr=1e-3, eps=(1e-12, 1e-12)),
    "muon": dict(name="muon", lr=0.02, adamw_lr=3e-3, adamw_eps=1e-4, ns_dtype="same"),
    "galore_adamw": dict(name="galore_adamw", lr=1e-2, eps=1e-4, rank=4, update_proj_gap=3),
    "galore_8bit": dict(
        name="galore_adamw", lr=1e-2, eps=1e-4, rank=4, update_proj_gap=3, projection="randomized", eight_bit=True
    ),
    "galore_adafactor": dict(name="galore_adafactor", lr=1e-2, eps=(1e-12, 1e-3), beta1=0.9, rank=4, update_proj_gap=3),
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


def exact(name: str) -> float:
    """How far ten steps may be off: iterations and decompositions of matrices add up more roundings."""
    return 1e-10 if name == "muon" or name.startswith("galore") else 1e-12


def cases(name: str, model: str, specs: list[dict[str, Any]], **settings: Any) -> list[Case]:
    return [(spec, model, {"optimizer": SMALL[name], **settings}) for spec in specs]


def test_norms() -> None:
    """Norms of whole tensors, also of those that some ranks share and of which a rank has a few elements."""
    lamb, lars = cases("lamb", "two", TENSOR_ZERO), cases("lars", "two", [TENSOR[2], *HOST])
    staged = cases("lamb", "two tied", [PIPELINE[1]])
    compare(4, [*lamb, *lars, *staged], batches(2), steps_alone, exact("lamb"))


@pytest.mark.parametrize("make", [partial(Lamb, lr=0.02, weight_decay=0.1), partial(Lars, lr=0.5, nesterov=True)])
def test_norms_on_the_host_take_kernels(make: Callable[..., Any]) -> None:
    """Within rounding of torch's operations, and with the same names in the state."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(300, 250, generator=generator)
    gradients = [torch.randn(300, 250, generator=generator) for _ in range(3)]
    found, used = [], []
    counting = {name: (lambda *a, f=f, n=name, **s: (used.append(n), f(*a, **s))[1]) for name, f in LAYERWISE.items()}
    for kernels in ({}, counting):
        parameter = torch.nn.Parameter(first.clone())
        optimizer = make([parameter])
        optimizer.kernels = kernels
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        found.append([parameter.detach(), *optimizer.state[parameter].values()])
    assert len(used) == 3
    for wanted, own in zip(*found, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)
    with engine_of(dict(zero=dict(stage=2, placement="cpu")), "llama", optimizer=SMALL["lamb"]) as engine:
        assert cast(Lamb, engine.optimizer).kernels is STEP_KERNELS


LISTS = {name: kernel for name, kernel in STEP_KERNELS.items() if name not in LAYERWISE}
GROUPS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0},
    {"always_adapt": False, "weight_decay": 0.0, "trust_clip": True},
]


@pytest.mark.parametrize(
    "make",
    [
        partial(Lamb, lr=0.02, weight_decay=0.1),
        partial(Muon, ns_dtype="same"),
        Lion,
        partial(Came, lr=0.01, clip_threshold=0.5, weight_decay=0.1),
        partial(Adafactor, lr=0.3, weight_decay=0.1),
        partial(AdafactorHF, beta1=0.9, clip_threshold=0.5, weight_decay=0.1),
        partial(AdafactorHF, lr=0.1, relative_step=False, scale_parameter=False),
    ],
)
def test_steps_over_lists_are_those_of_plain_operations(make: Callable[..., Any]) -> None:
    """In groups with settings of their own, with one parameter a step behind; and copies are written."""
    found = []
    for kernels in ({}, LISTS):
        generator = torch.Generator().manual_seed(0)
        shapes = ((6, 5), (3, 12), (7,), (3, 4, 4), (5,))
        parameters = [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]
        settings = (
            GROUPS if getattr(make, "func", make) is Lamb else GROUPS[:2] if isinstance(make, partial) else GROUPS[:1]
        )
        groups = [{"params": parameters[place :: len(settings)], **one} for place, one in enumerate(settings)]
        optimizer = make(groups)
        optimizer.kernels = kernels
        optimizer.copies = {p: torch.zeros_like(p, dtype=torch.bfloat16) for p in parameters}
        for number in range(4):
            for p in parameters[number == 0 :]:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            optimizer.step()
        found.append(
            [
                one.detach()
                for p in parameters
                for one in (p, *(optimizer.state[p][key] for key in sorted(optimizer.state[p])))
            ]
        )
        by_lists = {p for p in parameters if p.dim() > 1 or isinstance(optimizer, Lamb | Lion | Muon)}
        assert optimizer.copied == (by_lists if kernels else set())
        for p in optimizer.copied:
            assert torch.equal(optimizer.copies[p], p.to(torch.bfloat16))
    for wanted, own in zip(*found, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["lion", "muon", "came"])
def test_parameters_in_bfloat16_are_those_of_the_masters_after_a_step(name: str) -> None:
    with engine_of({}, "llama", optimizer=SMALL[name] | dict(lr=0.1), precision="bf16") as engine:
        before = [p.detach().clone() for p in engine.model.parameters()]
        engine.train_step(*batches(1))
        masters = [p for group in engine.optimizer.param_groups for p in group["params"]]
        rounded = sorted(float(p.detach().to(torch.bfloat16).double().sum()) for p in masters)
        assert rounded == sorted(float(p.detach().double().sum()) for p in engine.model.parameters())
        assert any(not torch.equal(p, was) for p, was in zip(engine.model.parameters(), before, strict=True))


slow = pytest.mark.slow
EXPERTS = dict(data=2, expert=2, tensor=2)


ZERO_EXPERTS = dict(data=4, expert=2, zero=dict(stage=2))


@pytest.mark.parametrize(
    "runs",
    [
        [("adafactor", EXPERTS), ("muon", ZERO_EXPERTS)],
        pytest.param(
            [
                ("muon", EXPERTS),
                ("came", dict(data=4, expert=2)),
                ("came", ZERO_EXPERTS),
                ("lamb", ZERO_EXPERTS),
                ("adafactor", dict(data=2, expert=2, zero=dict(stage=1), tensor=2)),
                ("adafactor_hf", ZERO_EXPERTS),
                ("muon", dict(data=2, expert=4, tensor=2, zero=dict(stage=3))),
                ("galore_adamw", dict(data=4, expert=4, zero=dict(stage=3))),
                ("galore_adafactor", ZERO_EXPERTS),
            ],
            marks=slow,
        ),
    ],
    ids=["some", "all"],
)
def test_experts_over_ranks(runs: list[tuple[str, dict[str, Any]]]) -> None:
    """Blocks of experts are over a part of the data axis, and so are their sums; under zero, over ranks that own the same."""
    found = run_on_ranks(4, experts_seen, runs)[0]
    for (name, parallel), seen in zip(runs, found, strict=True):
        serial = expert_cases.run({}, optimizer=SMALL[name])
        expert_cases.assert_same(seen, serial, (name, parallel))


def experts_seen(runs: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    return [expert_cases.run(parallel, optimizer=SMALL[name]) for name, parallel in runs]


EIGHT: list[dict[str, Any]] = [
    dict(tensor=dict(mode="3d", size=8)),
    dict(tensor=dict(mode="2.5d", size=8, depth=2)),
    dict(tensor=dict(mode="2d", size=4), zero=dict(stage=3)),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("parallel", [TENSOR[2], *TENSOR_ZERO, ZERO[2], *HOST, PIPELINE[1]], ids=str)
def test_elements(parallel: dict[str, Any]) -> None:
    compare(4, cases("lion", "two", [parallel]), batches(2), steps_alone, exact("lion"))


@pytest.mark.parametrize(
    ("model", "specs", "steps"),
    [("two", PIPELINE_TENSOR, 2), pytest.param("llama", [*PIPELINE_TENSOR, ZERO[2]], 3, marks=slow)],
)
def test_muon_by_roles(model: str, specs: list[dict[str, Any]], steps: int) -> None:
    """Roles are those of the whole model, whatever a rank has of it."""
    staged = [*cases("muon", model, specs), *cases("muon", "two tied", [PIPELINE[1]])]
    compare(4, staged, batches(steps), steps_alone, exact("muon"))
    for found in run_on_ranks(4, groups_of_muon, [dict(zero=dict(stage=1)), TENSOR[2]]):
        for groups, rates in found:
            assert groups == {"matrices": 4 * 4, "embeddings": 1, "head": 1, "norms_and_biases": 4 * 2 + 1}
            assert rates == [0.02, 3e-3, 3e-3, 3e-3]
    for rank, [(groups, _)] in enumerate(run_on_ranks(2, groups_of_muon, [dict(pipeline=2)])):
        norms = 2 * 2 + rank
        assert groups == {"matrices": 2 * 4, "embeddings": 1 - rank, "head": rank, "norms_and_biases": norms}


def groups_of_muon(specs: list[dict[str, Any]]) -> list[tuple[dict[str, int], list[float]]]:
    """Return the parameters that this rank has of each role, over the ranks that share them, and the groups' rates."""
    found = []
    for spec in specs:
        with engine_of(spec, "llama", optimizer=SMALL["muon"]) as engine:
            assert engine.optimizer is not None
            counts = [float(len(group["params"])) for group in engine.optimizer.param_groups]
            if "zero" in spec:  # an owner each
                counts = all_reduce(torch.tensor(counts), engine.mesh.group("data")).tolist()
            roles = [group["role"] for group in engine.optimizer.param_groups]
            rates = [group["lr"] for group in engine.optimizer.param_groups]
            found.append((dict(zip(roles, map(int, counts), strict=True)), rates))
    return found


def orthogonalised(specs: list[tuple[str, dict[str, Any]]]) -> list[int]:
    """Return how many matrices this rank orthogonalises in a step of Muon."""
    whole, found = muon.orthogonalize, []
    for model, spec in specs:
        counts: list[int] = []

        def counting(matrices: Tensor, counts: list[int] = counts, **settings: Any) -> Tensor:
            counts.append(len(matrices))
            return whole(matrices, **settings)

        muon.orthogonalize = counting
        try:
            if model == "experts":
                expert_cases.run(spec, steps=1, optimizer=SMALL["muon"])
            else:
                with engine_of(spec, model, optimizer=SMALL["muon"]) as engine:
                    engine.train_step(engine.shard_batch(batches(1)[0]))
        finally:
            muon.orthogonalize = whole
        found.append(sum(counts))
    return found


ONCE: list[tuple[str, dict[str, Any]]] = [
    ("llama", TENSOR[2]),
    ("experts", dict(data=4, expert=2)),
]


@pytest.mark.parametrize(
    ("count", "specs"),
    [
        (4, ONCE),
        pytest.param(
            4,
            [
                *(("llama", spec) for spec in (*TENSOR, *TENSOR_ZERO, *ZERO, *HOST, *PIPELINE, *PIPELINE_TENSOR)),
                ("llama", dict(data=4)),
                *(
                    ("experts", spec)
                    for spec in (dict(data=4), EXPERTS, ZERO_EXPERTS, dict(data=4, expert=4, zero=dict(stage=3)))
                ),
                ("experts", dict(data=2, tensor=2, expert=dict(size=2, tensor=2))),
            ],
            marks=slow,
        ),
        pytest.param(8, [("llama", spec) for spec in EIGHT], marks=slow),
    ],
    ids=["some", "all", "eight"],
)
def test_each_matrix_is_orthogonalised_by_one_rank(count: int, specs: list[tuple[str, dict[str, Any]]]) -> None:
    """Those of experts too, of which several ranks have copies."""
    alone = {"llama": 4 * 4, "experts": orthogonalised([("experts", {})])[0]}
    by_rank = run_on_ranks(count, orthogonalised, specs)
    for (model, spec), counts in zip(specs, zip(*by_rank, strict=True), strict=True):
        assert sum(counts) == alone[model], (model, spec, counts)


DIAGONAL: dict[str, list[dict[str, Any]]] = {
    "adafactor": [ZERO[0], TENSOR[2]],
    "adafactor_hf": [ZERO[2], *TENSOR_ZERO],
    "came": [PIPELINE[1], *PIPELINE_TENSOR, TENSOR[2]],
    "galore_adamw": [*PIPELINE_TENSOR, TENSOR[2]],
    "galore_8bit": [ZERO[1], TENSOR[1]],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DIAGONAL)
def test_matrices(name: str) -> None:
    """Rows and columns of whole tensors, also of those that some ranks share."""
    compare(4, cases(name, "two", DIAGONAL[name]), batches(FEW), steps_alone, exact(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_optimizer_under_every_spec(name: str) -> None:
    """Ten steps, of tied weights too, less exactly: the gradients of key biases there are zero but for rounding.

    Not of Lion, which takes their signs.
    """
    specs = [{}, *ZERO, *HOST, *TENSOR, *TENSOR_ZERO, *PIPELINE, *PIPELINE_TENSOR]
    specs += [dict(sequence=dict(mode="ring", size=2), zero=dict(stage=zero)) for zero in (1, 3)]
    specs += [dict(pipeline=2, zero=dict(stage=3)), dict(tensor=dict(mode="2d", size=4), zero=dict(stage=2))]
    compare(4, cases(name, "llama", specs), batches(STEPS), steps_alone, exact(name))
    if name != "lion":
        tied = [TENSOR[2], ZERO[2], *PIPELINE, *PIPELINE_TENSOR]
        compare(4, cases(name, "tied", tied), batches(STEPS), steps_alone)
    compare(8, cases(name, "llama", EIGHT), batches(STEPS), steps_alone, exact(name))


Sums = list[list[tuple[str, tuple[str, ...], int]]]


def norm_collectives(name: str, specs: list[dict[str, Any]]) -> Sums:
    """Return the collectives that a step sends with an optimizer and not with Lion: kind, axes and bytes."""
    found = []
    for spec in specs:
        counts = []
        for each in (name, "lion"):
            with engine_of(spec, "shallow", optimizer=SMALL[each]) as engine:
                with record() as log:
                    engine.train_step(engine.shard_batch(batches(1)[0]))
                counts.append(Counter((one.kind, one.axes, one.block_bytes) for one in log.entries))
        assert not counts[1] - counts[0]
        found.append(list((counts[0] - counts[1]).elements()))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_all_norms_are_summed_in_one_collective_a_step(name: str) -> None:
    """Two numbers a tensor in one all-reduce; none where every rank has whole tensors."""
    size = 2 * 8 * len(list(MODELS["shallow"]().parameters()))
    specs: list[dict[str, Any]] = [dict(data=4), TENSOR[2], TENSOR_ZERO[0]]
    axes = [None, ("row", "col"), ("data", "tensor")]
    for found in run_on_ranks(4, norm_collectives, name, specs):
        for sent, over in zip(found, axes, strict=True):
            assert sent == ([] if over is None else [("all_reduce", over, size)])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_state_of_zero_3_goes_on_under_tensor_parallelism(name: str, tmp_path: Path) -> None:
    relay([(4, ZERO[2]), (2, TENSOR[0]), (2, PIPELINE[0])], optimizer_leg, tmp_path, SMALL[name])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["adafactor_hf", "came"])
def test_state_of_owners_goes_on_elsewhere(name: str, tmp_path: Path) -> None:
    relay([(4, ZERO[2]), (2, PIPELINE[0])], optimizer_leg, tmp_path, SMALL[name])


def test_projections_go_on_under_another_spec(tmp_path: Path) -> None:
    relay([(2, ZERO[2]), (2, TENSOR[0])], optimizer_leg, tmp_path, SMALL["galore_8bit"])


def test_state_of_muon_goes_on_without_zero(tmp_path: Path) -> None:
    relay([(4, ZERO[2]), (2, {})], optimizer_leg, tmp_path, SMALL["muon"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "legs"),
    [
        *((name, [(2, TENSOR[0]), (4, PIPELINE[1]), (1, {})]) for name in ("lamb", "lars")),
        *((name, [(2, PIPELINE[0]), (1, {})]) for name in ("adafactor_hf", "came")),
        ("galore_8bit", [(2, TENSOR[0]), (1, {})]),
        ("muon", [(2, {}), (1, ZERO[0])]),
    ],
)
def test_state_of_zero_3_goes_on_through_other_specs(
    name: str, legs: list[tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    relay([(4, ZERO[2]), *legs], optimizer_leg, tmp_path, SMALL[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_state_of_zero_3_beside_2d_goes_on_under_1d(name: str, tmp_path: Path) -> None:
    relay([(8, EIGHT[2]), (2, TENSOR[0]), (4, PIPELINE_TENSOR[0]), (1, {})], optimizer_leg, tmp_path, SMALL[name])


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon])
def test_classes_of_torch_that_look_at_whole_matrices_are_refused_beside_tensor(cls: type[Any]) -> None:
    """Those of the same name ask for the rest of a matrix."""
    with pytest.raises(SpecError, match=rf"write optimizer=dict\(name='{cls.__name__.lower()}'\).*Known: adamw"):
        engine_of(dict(tensor=dict(mode="1d", size=1)), "llama", optimizer=dict(name=cls, lr=0.01))


def test_wrong_settings_are_refused_by_value() -> None:
    with pytest.raises(SpecError, match=r"betas=\(0.9, 1.5\)"):
        engine_of({}, "llama", optimizer=dict(name="lamb", betas=(0.9, 1.5)))
    with pytest.raises(SpecError, match="trust_coeff=-1"):
        engine_of({}, "llama", optimizer=dict(name="lars", trust_coeff=-1))
    with pytest.raises(SpecError, match="Did you mean 'lamb'"):
        engine_of({}, "llama", optimizer=dict(name="lambb"))


class Late(nn.Module):
    """Two layers; the second is used from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.first(x)
        return y if self.calls == 1 else self.second(y)


def test_a_first_gradient_may_come_after_the_first_step() -> None:
    """torch's fused SGD fails there."""
    torch.manual_seed(0)
    serial = Late().double()
    settings: dict[str, Any] = dict(precision="fp64", loss_fn=lambda y, batch: F.mse_loss(y, batch[1]))
    engine = Engine(copy.deepcopy(serial), dict(data=1), optimizer=dict(name="sgd", lr=0.1, momentum=0.9), **settings)
    reference = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    x, wanted = torch.randn(2, 2, 4, dtype=torch.float64)
    for _ in range(3):
        engine.train_step((x, wanted))
        reference.zero_grad()
        F.mse_loss(serial(x), wanted).backward()
        reference.step()
    for mine, theirs in zip(engine.model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)
    engine.close()
