"""Triangle modules against transformers' EsmFold, whose parameters have the same names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshfold.folding import (
    TriangleAttention,
    TriangleMultiplicationIncoming,
    TriangleMultiplicationOutgoing,
)

N, C = 7, 8


def randomise(module: nn.Module) -> nn.Module:
    """Give every parameter random values: AlphaFold's begin at zero, which would hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return module.double()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(2, N, N, C, generator=generator, dtype=torch.float64)
    mask = (torch.rand(2, N, N, generator=generator) > 0.3).double()
    mask[..., 0] = 1.0  # no row is masked altogether, where OpenFold rounds logits to 1e-7
    mask[..., 0, :] = 1.0
    return z, mask


def compare(ours: nn.Module, theirs: nn.Module) -> None:
    """Outputs and every gradient are equal to 1e-12."""
    ours.load_state_dict(theirs.state_dict())
    ours = ours.double()
    z, mask = inputs()
    results = []
    for module in (ours, theirs):
        x = z.clone().requires_grad_()
        y = module(x, mask)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for _, p in sorted(module.named_parameters()))])
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert a.abs().max() > 1e-3


@pytest.mark.parametrize("outgoing", [True, False])
def test_multiplication_equals_esmfold(outgoing: bool) -> None:
    from transformers.models.esm import modeling_esmfold

    class Config:
        pairwise_state_dim = C

    theirs = randomise(modeling_esmfold.EsmFoldTriangleMultiplicativeUpdate(Config(), _outgoing=outgoing))
    compare((TriangleMultiplicationOutgoing if outgoing else TriangleMultiplicationIncoming)(C, C), theirs)


@pytest.mark.parametrize("starting", [True, False])
def test_attention_equals_esmfold(starting: bool) -> None:
    from transformers.models.esm import modeling_esmfold

    theirs = randomise(modeling_esmfold.EsmFoldTriangleAttention(C, 4, 2, starting=starting))
    compare(TriangleAttention(C, 4, 2, starting=starting), theirs)
