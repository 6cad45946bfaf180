"""Moments in 8 bits, GaLore with them, randomized projections, and steps inside the backward."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.optimizers import GaLoreAdafactor, GaLoreAdamW, Lion, OptimizerSettingError, step_in_backward
from meshfold.optimizers.eight_bit import BLOCK, codes, pack, unpack
from meshfold.optimizers.galore import randomized_vectors, singular_vectors


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_paper(signed: bool) -> None:
    """256 of them, with seven powers of ten, whose distances double from one power to the next relative to it."""
    found = codes(signed=signed)
    assert len(found) == len(set(found)) == 256
    assert max(found) == 1.0 and 0.0 in found and (min(found) < 0) == signed
    top = [one for one in found if 0.1 < one < 1.0]
    assert len(top) == (64 if signed else 128)
    for earlier, later in pairwise(top):
        assert later - earlier == pytest.approx(0.9 / len(top))
    assert min(one for one in found if one > 0) == pytest.approx(5.5e-7 if signed else 3.25e-7)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(3, 100), (BLOCK,), (1,), (0, 5)], ids=str)
def test_a_number_becomes_the_nearest_code_times_the_scale_of_its_block(signed: bool, shape: tuple[int, ...]) -> None:
    values = normal(*shape) if signed else normal(*shape).square()
    packed = pack(values, signed=signed)
    blocks = -(-values.numel() // BLOCK)
    assert packed.dtype == torch.uint8 and packed.numel() == blocks * (BLOCK + 4)
    table = torch.tensor(codes(signed=signed))
    wanted = []
    for block in values.flatten().split(BLOCK) if values.numel() else ():
        share = block / block.abs().max()
        near = table[(share.unsqueeze(1) - table).abs().argmin(1)]
        if not signed:
            near = torch.where((share > 0) & (near == 0), table[1], near)
        wanted.append(near * block.abs().max())
    expected = torch.cat(wanted).view(shape) if wanted else values
    torch.testing.assert_close(unpack(packed, values, signed=signed), expected, rtol=1e-6, atol=0)
    as_loaded = packed.to(torch.bfloat16)  # by torch, for a parameter of this dtype
    assert torch.equal(unpack(as_loaded, values, signed=signed), unpack(packed, values, signed=signed))


def test_zeros_stay_and_a_small_square_does_not_become_zero() -> None:
    assert not unpack(pack(torch.zeros(300), signed=False), torch.zeros(300), signed=False).any()
    values = torch.tensor([1.0, 1e-12, 0.0])
    assert (unpack(pack(values, signed=False), values, signed=False) > 0).tolist() == [True, True, False]


@pytest.mark.few(1)
@pytest.mark.parametrize("cls", [GaLoreAdamW, GaLoreAdafactor])
def test_galore_with_8_bits_is_near_and_goes_on_from_its_state(cls: type[Any]) -> None:
    settings: dict[str, Any] = dict(
        lr=0.01, rank=8, update_proj_gap=4, **({"beta1": 0.9} if cls is GaLoreAdafactor else {})
    )
    gradients = [normal(40, 24, seed=seed) for seed in range(10)]

    def run(eight_bit: bool, resume: bool = False) -> tuple[Tensor, Any]:
        parameter = nn.Parameter(normal(40, 24, seed=99))
        optimizer = cls([parameter], eight_bit=eight_bit, **settings)
        for number, gradient in enumerate(gradients):
            if resume and number == 5:
                saved, optimizer = optimizer.state_dict(), cls([parameter], **settings)
                optimizer.load_state_dict(saved)
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach(), optimizer.state[parameter]

    exact, _ = run(False)
    found, state = run(True)
    moved = (exact - normal(40, 24, seed=99)).norm()
    assert 0 < (found - exact).norm() < 0.05 * moved
    assert state["low_rank_avg"].dtype == torch.uint8 and state["low_rank_avg"].numel() == 2 * (BLOCK + 4)
    assert torch.equal(run(True, resume=True)[0], found)


def test_parameters_in_bfloat16_have_moments_in_float32() -> None:
    parameters = [nn.Parameter(normal(*shape, dtype=torch.bfloat16)) for shape in ((16, 12), (7,))]
    wide = [nn.Parameter(p.detach().float()) for p in parameters]
    for some in (parameters, wide):
        optimizer = GaLoreAdamW(some, lr=0.1, rank=4)
        for step in range(4):
            for p in some:
                p.grad = normal(*p.shape, seed=step, dtype=torch.bfloat16).to(p.dtype)
            optimizer.step()
        assert all(optimizer.state[some[1]][key].dtype == torch.float32 for key in ("exp_avg", "exp_avg_sq"))
        assert optimizer.state[some[0]]["low_rank_avg_sq"].dtype == torch.float32
    for p, one in zip(parameters, wide, strict=True):
        torch.testing.assert_close(p.float(), one.detach(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(60, 30), (30, 60), (12, 12)], ids=str)
def test_randomized_projections_find_the_directions_of_large_singular_values(shape: tuple[int, ...]) -> None:
    """Those of a matrix whose singular values fall quickly, to their accuracy; a smaller matrix exactly."""
    left, _, right = torch.linalg.svd(normal(*shape, dtype=torch.float64), full_matrices=False)
    matrix = left * (0.5 ** torch.arange(min(shape), dtype=torch.float64)) @ right
    exact, found = singular_vectors(matrix, 5), randomized_vectors(matrix, 5)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-5)
    assert torch.equal(found, randomized_vectors(matrix, 5))


def test_steps_inside_the_backward_are_those_after_it() -> None:
    found = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = Lion(model.parameters(), lr=0.01)
        handles = step_in_backward(optimizer) if inside else []
        for step in range(3):
            model(normal(4, 5, seed=step)).square().sum().backward()
            if inside:
                assert all(p.grad is None for p in model.parameters())
            else:
                optimizer.step()
                optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        model(normal(4, 5)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        found.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("key", "value"), [("projection", "qr"), ("eight_bit", 8)])
def test_a_wrong_setting_is_named(key: str, value: object) -> None:
    with pytest.raises(OptimizerSettingError, match=f"GaLoreAdamW: {key}={value!r}"):
        GaLoreAdamW([nn.Parameter(torch.ones(2, 2))], **{key: value})
