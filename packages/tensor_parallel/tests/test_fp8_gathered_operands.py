"""Compiled products read the operand of dx in the backward, never before: a gathered one is not there in the forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from meshfold.kernels import FP8_RECIPES, Fp8Source, Fp8Tensor, fp8_backward, fp8_cast_weight, fp8_forward
from meshfold.tensor_parallel import bind_fp8_cast_products


def eager(graph: torch.fx.GraphModule, inputs: object) -> object:
    return graph.forward


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["rowwise", "rowwise_hp_dw", "tensorwise"])
def test_a_compiled_backward_reads_what_is_gathered_after_the_forward(name: str) -> None:
    recipe = FP8_RECIPES[name]

    def forward(x: Tensor, w: Fp8Tensor, weight: Tensor) -> tuple[Tensor, Fp8Source | None]:
        return fp8_forward(x, w, recipe, weight=weight)

    def backward(
        x: Tensor, w: Fp8Tensor, dy: Tensor, wants: tuple[bool, bool], source: Fp8Source | None
    ) -> tuple[Tensor | None, Tensor | None]:
        return fp8_backward(dy, x, w, recipe, wants=wants, source=source)

    product = bind_fp8_cast_products(recipe, forward, backward).product
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 64, generator=random).bfloat16().requires_grad_() for rows in (32, 48))
    y_operand, dx_operand = fp8_cast_weight(w.detach(), recipe)

    def block(x: Tensor, *operands: Tensor) -> Tensor:
        return torch.nn.functional.silu(product(x, w, operands))  # type: ignore[arg-type]

    found: list[list[Tensor]] = []
    backend = aot_autograd(fw_compiler=eager, partition_fn=min_cut_rematerialization_partition)
    for run in (block, torch.compile(block, backend=backend)):
        turned = dx_operand.values.t().contiguous()
        gathered = torch.full_like(turned.view(torch.uint8), 0x7F).view(turned.dtype)  # nan until it is gathered
        inverse = torch.full_like(dx_operand.inverse, torch.nan)
        y = run(x, y_operand.values, y_operand.inverse, gathered.t(), inverse)
        gathered.data.copy_(turned)
        inverse.data.copy_(dx_operand.inverse)
        found.append([y.detach(), *torch.autograd.grad(y.float().sum(), (x, w))])
    assert all(torch.equal(one, other) and one.isfinite().all() for one, other in zip(*found, strict=True))
