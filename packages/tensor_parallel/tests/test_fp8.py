"""Sharded linear layers in fp8: in every mode the rounded operands are blocks of the serial layer's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_parallel_checks import CASES, Case, mesh_of, share_of_data
from torch import Tensor, nn

from meshfold.kernels import FP8_RECIPES, Fp8Recipe, Fp8Tensor, bind_fp8_matmul, fp8
from meshfold.mesh import Mesh, Part, Placement
from meshfold.mesh.testing import run_on_ranks
from meshfold.tensor_parallel import Linear, Mode, find_mode
from meshfold.tensor_parallel.layers.linear import Role

TOKENS, HIDDEN, INNER = 128, 128, 256


def draw(rows: int, columns: int, seed: int) -> Tensor:
    """The same numbers on every rank, rows and columns of unlike sizes, none of them zero."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * torch.logspace(-3, 1, rows)[:, None] * torch.logspace(1, -2, columns)).bfloat16()


class Noted:
    """Notes the operands that are rounded while it is open."""

    def __enter__(self) -> list[Fp8Tensor]:
        seen: list[Fp8Tensor] = []
        self._own = own = fp8.to_fp8

        def to_fp8(*args: Any, **kwargs: Any) -> Fp8Tensor:
            seen.append(own(*args, **kwargs))
            return seen[-1]

        fp8.to_fp8 = to_fp8
        return seen

    def __exit__(self, *_: object) -> None:
        fp8.to_fp8 = self._own


def scales(operand: Fp8Tensor) -> Tensor:
    """The scale of each element."""
    high, wide = operand.tile or (1, 1)
    return (
        operand.inverse.expand(operand.values.shape)
        if operand.tile is None
        else (operand.inverse.repeat_interleave(high, 0).repeat_interleave(wide, 1))
    )


def compare(mesh: Mesh, mode: Mode, role: Role, recipe: Fp8Recipe) -> None:
    times = 4 if recipe.block else 1  # a rank's block of any dim is of whole tiles
    tokens, hidden, inner = times * TOKENS, times * HIDDEN, times * INNER
    n, k = (inner, hidden) if role == "column" else (hidden, inner)
    serial = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    serial.weight.data.copy_(draw(n, k, 1))
    plan, outer = mode.plans[role], tuple(axis for axis in ("data",) if axis in mesh.names)
    layer = Linear.convert(serial, mesh, mode, role)
    assert not layer.fp8_refusal(recipe)
    layer.use_fp8(recipe, outer)

    x, dy = draw(tokens, k, 2).requires_grad_(), draw(tokens, n, 3)
    with Noted() as wanted:
        y = bind_fp8_matmul(recipe)(x, serial.weight)
        y.backward(dy)
    x_share, dy_share = share_of_data(x.detach(), mesh), share_of_data(dy, mesh)
    x_at = Placement(shape=tuple(x_share.shape), axes=(plan.x[plan.m], plan.x[plan.k]))
    y_at = Placement(shape=tuple(dy_share.shape), axes=(plan.y[plan.m], plan.y[plan.n]))
    mine = x_at.shard(x_share, mesh).requires_grad_()
    with Noted() as found:
        local = layer(mine)
        local.backward(y_at.shard(dy_share, mesh))

    # The rank's block of each operand of y, dx and dw, from the axes that split its dims.
    axes = {
        "m": (*outer, *plan.compute[plan.m]),
        "k": plan.compute[plan.k],
        "n": plan.compute[plan.n],
    }
    operands = ("mk", "nk", "mn", "kn", "nm", "km") if recipe.weight_gradient else ("mk", "nk", "mn", "kn")
    assert len(found) == len(wanted) == len(operands)
    for dims, one, whole in zip(operands, found, wanted, strict=True):
        at = Placement(shape=tuple(whole.values.shape), axes=(axes[dims[0]], axes[dims[1]]))
        assert torch.equal(one.values.view(torch.uint8), at.shard(whole.values.view(torch.uint8), mesh)), dims
        assert torch.equal(scales(one), at.shard(scales(whole), mesh)), dims

    # Partial sums are rounded to bf16 before they are added.
    assert x.grad is not None and mine.grad is not None
    for ours, theirs in (
        (y_at.gather(local.detach(), mesh), share_of_data(y.detach(), mesh)),
        (x_at.gather(mine.grad, mesh), share_of_data(x.grad, mesh)),
    ):
        assert float((ours - theirs).abs().max()) <= 0.02 * float(theirs.abs().max())


def modes(case: Case) -> None:
    mode, axes = case
    for recipe in FP8_RECIPES.values():
        for role in ("column", "row"):
            compare(mesh_of(axes), find_mode(mode), role, recipe)  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [case for some in CASES.values() for case in some], ids=str)
def test_operands_are_blocks_of_the_serial_ones(case: Case) -> None:
    world = 1
    for _, size in case[1]:
        world *= size
    run_on_ranks(world, modes, case)


def _refusals() -> None:
    mesh = mesh_of((("tensor", 2),))

    def refusal(
        n: int, k: int, role: Role = "column", mode: str = "1d", recipe: str = "rowwise", **settings: Any
    ) -> str:
        return Linear.convert(nn.Linear(k, n), mesh, find_mode(mode), role, **settings).fp8_refusal(FP8_RECIPES[recipe])

    assert refusal(64, 32) == ""
    assert "no multiple of 16" in refusal(48, 32)  # 24 on a rank
    assert "no multiple of 16" in refusal(64, 40)
    assert "no multiple of 128" in refusal(128, 128, recipe="block128") and refusal(256, 128, recipe="block128") == ""
    assert "its parts on a rank are no multiples of 128" in refusal(
        512, 128, recipe="block128", parts=(Part(384), Part(128))
    )
    assert "logits" in refusal(64, 32, "head")
    assert "in pieces" in refusal(64, 32, "column", "1d+sequence", lowering="ring")
    assert "several ranks hold" in refusal(32, 32, parts=(Part(32, 2),))


def test_what_cannot_multiply_in_fp8_says_why() -> None:
    run_on_ranks(2, _refusals)
