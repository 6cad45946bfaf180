"""Automatic placement in a loop of one's own, without the engine."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh, ParameterMeta, Placement, SpecError, all_reduce, annotate
from meshfold.mesh.testing import ranks
from meshfold.zero_gemini import AutoPlacement, Gemini, Memory, MemoryPlanError
from meshfold.zero_gemini.machine_rates import CORRECTED_AFTER, TRACED_STEPS, step_measurements
from meshfold.zero_gemini.planner import H200, REGIMES, Limits, Regime

WIDTH, LAYERS = 64, 6
STEPS = TRACED_STEPS + CORRECTED_AFTER + 1
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
TIGHT = Limits(gpu_bytes=320_000)  # all weights, gradients and moments take 400 KB


def parts(mesh: Mesh, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Gemini]:
    """Return a model and what holds it, replicated over the data ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))).to(dtype)
    for p in model.parameters():
        place = Placement(shape=tuple(p.shape), axes=((),) * p.dim())
        annotate(p, ParameterMeta(mesh=mesh, placement=place, sum_axes=("data",)))
    gemini = Gemini(
        model,
        mesh,
        stage=3,
        memory=Memory(torch.device("cpu")),
        make_optimizer=lambda own: torch.optim.AdamW(own, lr=1e-2),
        chunk_elems=WIDTH * (WIDTH + 1),
    )
    return model, gemini


def train(
    mesh: Mesh, limits: Limits | None = None, *, accumulation: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[list[float], AutoPlacement | None]:
    """Train some steps, placed automatically if there are limits; return the losses."""
    model, gemini = parts(mesh, dtype)
    mine = X.to(dtype).chunk(mesh.size("data"))[mesh.index("data")]
    auto = None if limits is None else AutoPlacement(model, gemini, mesh, limits=limits, accumulation=accumulation)

    def micro_step(number: int) -> Tensor:
        gemini.begin(last=number == accumulation - 1)
        loss: Tensor = model(mine).square().mean() / (mesh.size("data") * accumulation)
        loss.backward()
        return loss.detach()

    losses = []
    with mock.patch.object(step_measurements, "measure_machine", return_value=H200):  # measured elsewhere, in seconds
        for _ in range(STEPS):
            total = torch.zeros((), dtype=dtype)
            for number in range(accumulation):
                if auto is None:
                    total += micro_step(number)
                else:
                    with auto.watching():
                        total += micro_step(number)
            gemini.clip(1.0)
            gemini.step()
            if auto is not None:
                auto.stepped()
            losses.append(float(all_reduce(total, mesh.group("data"))))
    gemini.close()
    return losses, auto


@pytest.mark.few(1)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_chunks_move_within_the_limit_and_the_losses_stay(accumulation: int) -> None:
    mesh = Mesh(dict(data=1))
    plain, _ = train(mesh, accumulation=accumulation)
    placed, auto = train(mesh, TIGHT, accumulation=accumulation)
    assert placed == plain
    assert auto is not None and auto.plan is not None and auto.moves >= 1
    assert auto.plan.peak_gpu_bytes <= TIGHT.gpu_bytes
    assert {one.state for one in auto.plan.chunks} > {"host"}, "some state fits the device, some does not"
    assert auto.plan.workload.accumulation == accumulation


def test_everything_stays_where_it_fits() -> None:
    _, auto = train(Mesh(dict(data=1)), Limits())
    assert auto is not None and auto.plan is not None
    assert {(one.parameters, one.state) for one in auto.plan.chunks} == {("gpu", "gpu")}


def test_a_limit_that_nothing_meets_is_refused_with_one_that_would_do() -> None:
    with pytest.raises(MemoryPlanError, match=r"the GPU limit binds\. With .* it needs at least [\d,]+ bytes"):
        train(Mesh(dict(data=1)), Limits(gpu_bytes=1000))


def test_an_unknown_regime_is_refused() -> None:
    mesh = Mesh(dict(data=1))
    model, gemini = parts(mesh)
    with pytest.raises(SpecError, match="regime='D': write 'A', 'B' or 'C'"):
        AutoPlacement(model, gemini, mesh, regime="D")
    gemini.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_float64_model_is_planned_with_the_bytes_that_it_takes(accumulation: int) -> None:
    mesh, element = Mesh(dict(data=1)), torch.float64.itemsize
    plain, _ = train(mesh, accumulation=accumulation, dtype=torch.float64)
    limits = Limits(gpu_bytes=2 * TIGHT.gpu_bytes)
    placed, auto = train(mesh, limits, accumulation=accumulation, dtype=torch.float64)
    assert placed == plain
    assert auto is not None and auto.plan is not None
    regime = auto.plan.workload.regime
    assert (regime.parameter, regime.state, regime.gradient) == (element, 2 * element, element)
    assert auto.plan.peak_gpu_bytes <= limits.gpu_bytes
    assert {one.state for one in auto.plan.chunks} > {"host"}, "some state fits the device, some does not"


def test_regimes_follow_the_dtypes() -> None:
    alone, summed = dict(accumulation=1, ranks=1), dict(accumulation=1, ranks=2)
    assert Regime.of("B", torch.bfloat16, torch.float32, **alone) == REGIMES["B"]
    assert Regime.of("B", torch.bfloat16, torch.float32, **summed) == REGIMES["B"].with_gradient(4)
    assert Regime.of("B", torch.float32, torch.float32, **alone) == REGIMES["fp32"]
    assert Regime.of("B", torch.float16, torch.float32, **alone) == REGIMES["fp16"]
    momentum = Regime.of("A", torch.bfloat16, torch.float32, moments=1, **summed)  # torch's SGD on float32 masters
    assert (momentum.parameter, momentum.state, momentum.gradient) == (2, 8, 4)
    assert momentum.step == momentum.first_pass == 4 + 2 * (2 + 8)
    whole = Regime.of("A", torch.bfloat16, torch.bfloat16, **summed)  # no float32 anywhere: torch steps it
    assert (whole.parameter, whole.state, whole.gradient) == (2, 4, 2)


@ranks(2)
def test_two_ranks_make_one_plan() -> None:
    mesh = Mesh(dict(data=2))
    plain, _ = train(mesh)
    placed, auto = train(mesh, Limits(gpu_bytes=200_000))
    assert placed == plain
    assert auto is not None and auto.plan is not None
    assert any(one.state == "host" for one in auto.plan.chunks)
