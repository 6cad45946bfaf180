"""Products of one row with a weight, or with its codes, and the operations around them: a Triton kernel on a GPU.

    y = silu(r gate^T + b) * (r weight^T + b) + add,   r = rms_norm(x)

Each part but the product may be left out. Everything is computed in float32 (float64 for float64) and rounded once, at the
output; a row of 16 bits that codes multiply may be rounded before too, to 2^-15 of the largest of 16 neighbours. For a single
row, a library's product reads the weights more slowly than memory delivers them. Norms and activations of one row take as long to
launch as to run.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.kernels.inputs import compute_dtype


class RowWeight(NamedTuple):
    """A linear layer, as a product of one row reads it.

    Attributes:
        weight: ``n k``, rows contiguous; or codes, as in :class:`meshfold.kernels.PackedWeight`.
        bias: ``n``, or None.
        scale, zero: of codes.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    zero: Tensor | None = None

    def part(self, start: int, stop: int) -> RowWeight:
        """Return some of its outputs."""
        return RowWeight(*(None if each is None else each[start:stop] for each in self))  # type: ignore[arg-type]


def is_one_row(x: Tensor) -> bool:
    """Return True if an input is one row that the kernel takes."""
    return (
        x.is_cuda
        and x.numel() == x.shape[-1]
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and find_spec("triton") is not None
    )


def row_product(
    x: Tensor,
    layer: RowWeight,
    *,
    gate: RowWeight | None = None,
    norm: tuple[Tensor, float] | None = None,
    add: Tensor | None = None,
) -> Tensor:
    """Multiply one row by a weight: ``.. k -> .. n``, in the dtype of ``x``, without gradients.

    Args:
        x: of k elements in all.
        layer: what it is multiplied with.
        gate: a layer of the same form; its result gates the other by SiLU.
        norm: gain ``k`` and epsilon of an RMSNorm of x before.
        add: is added to the result; of its shape.
    """
    if is_one_row(x):
        from meshfold.kernels.row_product_triton import product  # which needs Triton

        return product(x, *layer, gate=gate, norm=norm, add=add)
    dtype = compute_dtype(x)
    given = x.to(dtype)
    if norm is not None:
        given = F.rms_norm(given, given.shape[-1:], norm[0].to(dtype), norm[1])
    y = _linear(given, layer)
    if gate is not None:
        y = F.silu(_linear(given, gate)) * y
    return (y if add is None else y + add).to(x.dtype)


def _linear(x: Tensor, layer: RowWeight) -> Tensor:
    weight, bias, scale, zero = layer
    if scale is not None:
        from meshfold.kernels.packed_weight import PackedWeight

        weight = PackedWeight(codes=weight, scale=scale, zero=zero).unpack(x.dtype)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
