"""How tensors lie that travel between stages: each stage believes it of what stands for them, and the one before sees to it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from meshfold.mesh import LayoutError
from meshfold.mesh.tracking import Lies, lies
from meshfold.mesh.tracking.dims import Dims, axes_of, is_open

Layouts = dict[int, Lies]
"""By place among the arguments of a block; empty where the forward is not looked at."""


def layouts_of(leaves: Mapping[int, Tensor]) -> Layouts:
    """How a block's arguments lie."""
    return {place: known for place, leaf in leaves.items() if (known := lies(leaf)) is not None}


def check_handed_on(block: int, began: Layouts, leaves: Mapping[int, Tensor]) -> None:
    """See that what a stage hands on lies as what its first block was given.

    Args:
        block: the next stage's first.
        began: of this stage's first block.
        leaves: what the next stage's is called with.

    Raises:
        LayoutError: if it does not.
    """
    for place, known in layouts_of(leaves).items():
        now, before = known.dims, began[place].dims if place in began else known.dims
        if len(before) == len(now) and before != now:
            raise LayoutError(
                f"block {block}, the first of a stage, is called with a tensor {list(leaves[place].shape)} {_split(now)}, and the "
                f"first block of the stage before with one {_split(before)}: blocks of a pipeline return a tensor that is split "
                "over ranks as the one they are given. Turn it back at the end of the block, or use a spec without pipeline"
            )


def _split(dims: Dims) -> str:
    found = [
        f"dim {number} is split over {', '.join(axes_of(dim))}"
        for number, dim in enumerate(dims)
        if axes_of(dim)
    ]
    found += [f"nothing tells how dim {number} is split" for number, dim in enumerate(dims) if is_open(dim)]
    return f"of which {' and '.join(found)}" if found else "that is whole on every rank"
