"""The gradient norm and clipping of a sharded model are those of the whole one."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from meshfold.mesh import (
    Mesh,
    ParameterMeta,
    Part,
    Placement,
    SpecError,
    annotate,
    clip_gradients,
    gradient_norm,
    record,
)
from meshfold.mesh.testing import fake_world, run_on_ranks

PLACEMENTS = {
    "both dims": Placement(shape=(8, 6), axes=(("a",), ("b",))),
    "padded": Placement(shape=(7, 3), axes=(("b", "a"), ())),
    "one dim": Placement(shape=(4, 6), axes=((), ("b",))),
    "replicated": Placement(shape=(5,), axes=((),)),
    "repeated parts": Placement(shape=(12, 2), axes=(("a", "b"), ()), parts={0: (Part(8), Part(2, 2), Part(2, 2))}),
    "parts": Placement(shape=(6, 8), axes=((), ("a",)), parts={1: (Part(2), Part(6))}),
    "two fused dims": Placement(
        shape=(6, 4), axes=(("a",), ("b",)), parts={0: (Part(4), Part(2)), 1: (Part(1, 2), Part(3, 2))}
    ),
    "scalar": Placement(shape=(), axes=()),
}


@cache
def mesh_of(**axes: int) -> Mesh:
    return Mesh(axes)


def full_gradients(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(placement.shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, placement in PLACEMENTS.items()
    }


def sharded(dtype: torch.dtype, mesh: Mesh) -> list[nn.Parameter]:
    parameters = []
    for name, grad in full_gradients(dtype).items():
        local = PLACEMENTS[name].shard(grad, mesh)
        parameter = nn.Parameter(torch.zeros_like(local))
        parameter.grad = local
        annotate(parameter, ParameterMeta(mesh=mesh, placement=PLACEMENTS[name]))
        parameters.append(parameter)
    parameters.append(nn.Parameter(torch.zeros(3)))  # has no gradient
    bare = nn.Parameter(torch.zeros(2, dtype=dtype))  # has no metadata: it is replicated
    bare.grad = torch.tensor([0.5, -2.0], dtype=dtype)
    return [*parameters, bare]


def whole(dtype: torch.dtype) -> list[nn.Parameter]:
    parameters = []
    for grad in [*full_gradients(dtype).values(), torch.tensor([0.5, -2.0], dtype=dtype)]:
        parameter = nn.Parameter(torch.zeros_like(grad))
        parameter.grad = grad
        parameters.append(parameter)
    return parameters


def clip_on_rank(dtype: torch.dtype, norm_type: float, max_norm: float) -> tuple[Tensor, Tensor, float]:
    """(norm, norm returned by clipping, largest difference of a clipped gradient to the whole model's)."""
    mesh = mesh_of(a=2, b=2)
    parameters, reference = sharded(dtype, mesh), whole(dtype)
    norm = gradient_norm(parameters, mesh, norm_type)
    clipped = clip_gradients(parameters, mesh, max_norm, norm_type)
    nn.utils.clip_grad_norm_(reference, max_norm, norm_type)
    off = 0.0
    for placement, parameter, want in zip(PLACEMENTS.values(), parameters, reference, strict=False):
        assert parameter.grad is not None and want.grad is not None
        off = max(off, (parameter.grad - placement.shard(want.grad, mesh)).abs().max().item())
    return norm, clipped, off


@pytest.mark.parametrize("norm_type", [1, 2, 3.0, math.inf])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("max_norm", [0.7, 1e6])
def test_norm_and_clipping_are_those_of_torch_on_the_whole_model(
    norm_type: float, dtype: torch.dtype, tolerance: float, max_norm: float
) -> None:
    expected = nn.utils.get_total_norm([p.grad for p in whole(dtype) if p.grad is not None], norm_type).double()
    results = run_on_ranks(4, clip_on_rank, dtype, norm_type, max_norm)
    for norm, clipped, off in results:
        assert norm.dtype == torch.float64 and norm.item() == pytest.approx(expected.item(), rel=tolerance)
        assert torch.equal(norm, clipped) and off <= tolerance
        assert torch.equal(norm, results[0][0]), "the bits differ from rank to rank"


def test_bfloat16_is_summed_in_float32() -> None:
    expected = nn.utils.get_total_norm([p.grad.double() for p in whole(torch.bfloat16) if p.grad is not None])
    for norm, _, _ in run_on_ranks(4, clip_on_rank, torch.bfloat16, 2.0, 1.0):
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)


def norm_with_a_bad_element(value: float) -> float:
    mesh = mesh_of(a=2, b=2)
    parameters = sharded(torch.float32, mesh)
    if mesh.rank == 3:
        assert parameters[0].grad is not None
        parameters[0].grad[0, 0] = value
    return gradient_norm(parameters, mesh).item()


def test_one_rank_with_an_overflow_is_seen_by_all() -> None:
    assert run_on_ranks(4, norm_with_a_bad_element, math.inf) == [math.inf] * 4
    assert all(math.isnan(norm) for norm in run_on_ranks(4, norm_with_a_bad_element, math.nan))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_what_is_not_finite_is_seen_and_what_is_empty_is_not(norm_type: float) -> None:
    for value in (math.inf, math.nan):
        parameters = [nn.Parameter(torch.zeros(n)) for n in (3, 0, 2)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        parameters[0].grad = torch.tensor([1.0, value, 2.0])
        norm = gradient_norm(parameters, Mesh({}), norm_type).item()
        assert norm == value or (math.isnan(value) and math.isnan(norm))


def test_kernels_and_collectives_do_not_grow_with_the_parameters() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(40)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    with fake_world(4), record() as log:
        gradient_norm(parameters, Mesh(dict(a=2, b=2)))
    assert [(entry.kind, entry.axes, entry.block_bytes) for entry in log.entries] == [("all_reduce", ("a", "b"), 8)]
    with torch.profiler.profile() as profile:
        gradient_norm(parameters, Mesh({}))
    called = [event.key for event in profile.key_averages()]
    assert "aten::_foreach_norm" in called
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::add") <= 2


def test_without_gradients_the_norm_is_zero() -> None:
    assert gradient_norm([nn.Parameter(torch.ones(3))], Mesh({})).item() == 0.0
    assert clip_gradients([], Mesh({}), 1.0, math.inf).item() == 0.0


def test_a_rank_without_gradients_says_where_the_norm_is_wanted() -> None:
    """Over a GPU's back end its zero must be on the GPU as well, where the others' sums are."""
    frozen, mesh = [nn.Parameter(torch.ones(3), requires_grad=False)], Mesh({"data": 1})
    assert gradient_norm(frozen, mesh).device == torch.device("cpu")
    assert gradient_norm(frozen, mesh, device="meta").is_meta
    assert clip_gradients(frozen, mesh, 1.0, device="meta").is_meta


@pytest.mark.parametrize("value", [0, -1.0, "2", True, None, math.nan])
def test_what_is_not_a_norm(value: object) -> None:
    with pytest.raises(SpecError, match=r"norm_type=.*: give a number above 0, such as 1 or 2, or math.inf"):
        gradient_norm([], Mesh({}), value)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"max_norm=.*: the largest norm allowed is a number above 0"):
        clip_gradients([], Mesh({}), value)  # type: ignore[arg-type]


def norms_over_stages(norm_type: float) -> float:
    """A parameter of one stage, split over ``a``, and one that both stages have."""
    mesh = mesh_of(pipe=2, a=2)
    stage = mesh.index("pipe")
    split, tied = Placement(shape=(4,), axes=(("a",),)), Placement(shape=(3,), axes=((),))
    own = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    own.grad = split.shard(torch.arange(1.0, 5.0, dtype=torch.float64) * (1 + stage), mesh)
    annotate(own, ParameterMeta(mesh=mesh, placement=split, only_at={"pipe": (stage,)}))
    both = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    both.grad = torch.full((3,), 7.0, dtype=torch.float64)
    annotate(both, ParameterMeta(mesh=mesh, placement=tied, tie="both", only_at={"pipe": (0, 1)}))
    return float(gradient_norm([own, both], mesh, norm_type))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_stages_count_what_they_alone_have_and_a_tie_counts_once(norm_type: float) -> None:
    gradients = torch.tensor([1.0, 2, 3, 4, 2, 4, 6, 8, 7, 7, 7])
    wanted = float(torch.linalg.vector_norm(gradients, norm_type))
    assert run_on_ranks(4, norms_over_stages, norm_type) == pytest.approx([wanted] * 4)
