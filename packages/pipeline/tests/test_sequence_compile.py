"""Attention inside torch.compile: one graph, the same numbers."""

from __future__ import annotations

import pytest
import torch

from meshfold.mesh import Mesh
from meshfold.mesh.testing import ranks
from meshfold.sequence import attention


def layer(x: torch.Tensor, mesh: Mesh, mode: str) -> torch.Tensor:
    return attention(x[:, :, :4], x[:, :, 4:6], x[:, :, 6:], mesh=mesh, mode=mode, length=15).sin().sum()


@pytest.mark.slow  # most of it is the compiler's start
@pytest.mark.parametrize("mode", ["ring", "ulysses", "ring_self"])
@ranks(2)
def test_compiled_in_one_graph(mode: str) -> None:
    """The ring is traced through, and keeps its order of messages and tiles."""
    mesh = Mesh({"seq": 2})
    x = torch.randn(1, 8, 8, 8, requires_grad=True)
    plain = layer(x, mesh, mode)
    (wanted,) = torch.autograd.grad(plain, x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got = compiled(x, mesh, mode)
    torch.testing.assert_close(got, plain)
    torch.testing.assert_close(torch.autograd.grad(got, x)[0], wanted)
