"""Blocks inside torch.compile on one rank: one graph the first time too, and none for a second block of the same sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from meshfold.folding import EvoformerBlock, TriangleAttention, TriangleMultiplicationIncoming, parallelize_folding
from meshfold.mesh import Mesh


class Pairs(nn.Module):
    """The two updates of pairs that split axes change."""

    def __init__(self) -> None:
        super().__init__()
        self.product = TriangleMultiplicationIncoming(4, 4)
        self.attention = TriangleAttention(4, 2, 2, starting=False)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        z = z + self.product(z, mask)
        y: Tensor = self.attention(z, mask)
        return y


def evoformer() -> nn.Module:
    return EvoformerBlock(4, 4, 2, 2, 4, 2, 2, 2, 2, 0.0, 0.0)


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (Pairs, ((1, 5, 5, 4), (1, 5, 5))),
        pytest.param(evoformer, ((1, 3, 5, 4), (1, 5, 5, 4), (1, 3, 5), (1, 5, 5)), marks=pytest.mark.slow),
    ],
    ids=["pairs", "evoformer"],
)
def test_blocks_share_one_graph(make: Callable[[], nn.Module], shapes: tuple[tuple[int, ...], ...]) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(make() for _ in range(2))
    parallelize_folding(blocks, Mesh({"axial": 1}, rank=0))  # a mesh that nothing has been asked yet
    given = [torch.randn(shape) for shape in shapes]
    if len(shapes) == 4:
        given[2:] = [torch.ones(shape) for shape in shapes[2:]]
    torch.compiler.reset()
    counter = CompileCounter()
    try:
        for block in blocks:
            made = torch.compile(block, fullgraph=True, backend=counter)(*given)
            torch.testing.assert_close(made, block(*given))
    finally:
        torch.compiler.reset()
    assert counter.frame_count == 1
