"""``parameter.numel()`` of a parameter that is in chunks tells its size, which scripts add up."""

from __future__ import annotations

from functools import partial

from torch import nn

from meshfold.mesh import Mesh
from meshfold.mesh.parameters import metadata_on


def tell_sizes(model: nn.Module, mesh: Mesh) -> None:
    """Let parameters that come and go say how many elements they have while they are there.

    Args:
        model: under ZeRO stage 3.
        mesh: that it lies on; over tensor axes it is the block's size.
    """
    for parameter in model.parameters():
        shape = metadata_on(parameter, mesh).placement.local_shape(mesh)
        size = 1
        for length in shape:
            size *= length
        parameter.numel = partial(int, size)  # type: ignore[method-assign]
