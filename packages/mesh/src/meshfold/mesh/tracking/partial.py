"""Gradients that would be a part on each rank: of what is the same on every rank and meets pieces.

Backward gives each rank the gradient of its own piece, and what all ranks have needs the sum of these. Layers that are split sum
what they must; a model's own code does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshfold.mesh.tracking.call import tensors_in
from meshfold.mesh.tracking.dims import Dims, axes_in

if TYPE_CHECKING:
    from meshfold.mesh.tracking.follow import Tracker


def check_gradients(
    found: Tracker, name: str, operands: Sequence[Tensor], results: Sequence[Dims], out: Any
) -> None:
    """See that all operands that want a gradient get what they count on: the whole of it, or a part of what is summed.

    Args:
        found: the tracker, in whose records operands lie as before the call.
        name: of the operation.
        operands: its tensors.
        results: how its results lie; empty: as tensors that are whole.
        out: these results.

    Raises:
        LayoutError: for an operand that would get a part and is whole.
    """
    wanting = [x for x in operands if x.requires_grad] if torch.is_grad_enabled() else []
    made = [x for x in tensors_in(out) if x.is_floating_point() or x.is_complex()]
    if not wanting or not made:
        return
    dealt = () if found.dealt is None else found.dealt.axes  # of these all parameters are summed over
    summed = frozenset[str]().union(*map(found.records.summed, wanting))
    axes = {axis for dims in results for axis in axes_in(dims)} - {*dealt}
    for x in wanting:
        if missing := sorted((axes | summed) - axes_in(found.dims(x)) - found.records.summed(x)):
            found.refuse(
                name,
                f"brings a tensor {list(x.shape)} that is the same on every rank, and is trained or was made of what is, together "
                f"with one that differs along {', '.join(missing)}: each rank would have a part of its gradient",
                *operands,
                axes=tuple(missing),
            )
    if summed - axes:
        found.records.sum_over(made, summed - axes)
