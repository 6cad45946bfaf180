"""torch's FSDP2 on the blocks of the tensor-parallel benchmark: whole sequences on each rank, weights gathered, no tensor split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def shard_blocks(blocks: Sequence[nn.Module], device_mesh: Any, *, compiled: bool) -> nn.Module:
    """Return blocks in a list, each a group of its own that is gathered for forward and again for backward.

    Gradients are summed in the weights' dtype, as under the tensor-parallel contestants.

    Args:
        blocks: with the same weights on every rank.
        device_mesh: of one dimension.
        compiled: each block by ``torch.compile``.
    """
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        if compiled:
            block.compile(dynamic=False)
        fully_shard(block, mesh=device_mesh)
    stack = _Stack(blocks)
    fully_shard(stack, mesh=device_mesh)
    return stack


class _Stack(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        for block in self.blocks:
            x = block(x, cos, sin)
        return x
