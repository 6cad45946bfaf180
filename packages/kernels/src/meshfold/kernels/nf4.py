"""NF4: weights in four bits, for a frozen base with trained adapters (Dettmers et al. 2023, arXiv 2305.14314).

A block of 64 elements of a row is divided by its largest absolute value. Each element is rounded to the nearest of sixteen levels:
quantiles of a normal distribution between -1 and 1, including zero. A matrix becomes one tensor of bytes, row by row, so that it
can be sharded, moved and written like any other tensor::

    row of k elements  ->  k/2 bytes of codes, the first element of a pair in the upper half,
                           then k/64 scales, float32, four bytes each

Half a byte and a sixteenth of one per element: 4.5 bits. Everything is plain torch, on any device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NF4_BLOCK = 64
"""Elements of a row that share a scale."""
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The values of the sixteen codes (appendix E of the paper)."""
_SCALE = 4  # bytes
_AT_ONCE = 2**22  # elements per pass: rounding needs about 20 bytes each


def packed_bytes(k: int) -> int:
    """Return the bytes of a row of ``k`` elements.

    Raises:
        ValueError: if ``k`` is not a multiple of the block size.
    """
    if k % NF4_BLOCK:
        raise ValueError(f"a row of {k} elements cannot be packed: NF4 takes multiples of {NF4_BLOCK}")
    return k // 2 + k // NF4_BLOCK * _SCALE


@torch.no_grad()
def pack_nf4(weight: Tensor) -> Tensor:
    """``n k`` of floating point -> ``n (k/2 + k/16)`` bytes (uint8), on the same device.

    Raises:
        ValueError: if ``k`` is not a multiple of the block size.
    """
    n, k = weight.shape
    packed = torch.empty(n, packed_bytes(k), dtype=torch.uint8, device=weight.device)
    levels = torch.tensor(LEVELS, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    rows = max(1, _AT_ONCE // k)
    for start in range(0, n, rows):
        part = weight[start : start + rows].float().unflatten(1, (-1, NF4_BLOCK))
        scales = part.abs().amax(-1, keepdim=True)
        codes = torch.bucketize(part / scales.clamp(min=torch.finfo(torch.float32).tiny), middles)
        pairs = codes.flatten(1).unflatten(1, (-1, 2)).to(torch.uint8)
        out = packed[start : start + rows]
        out[:, : k // 2] = pairs[..., 0] << 4 | pairs[..., 1]
        out[:, k // 2 :] = scales.flatten(1).contiguous().view(torch.uint8)
    return packed


@torch.no_grad()
def unpack_nf4(packed: Tensor, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """``n (k/2 + k/16)`` bytes -> ``n k``: the values of the codes."""
    codes = packed[:, : k // 2]
    scales = packed[:, k // 2 :].contiguous().view(torch.float32)
    levels = torch.tensor(LEVELS, device=packed.device)
    values = levels[torch.stack((codes >> 4, codes & 15), dim=-1).long()]
    found: Tensor = values.flatten(1).unflatten(1, (-1, NF4_BLOCK)) * scales.unsqueeze(-1)
    return found.flatten(1).to(dtype)


class _Multiply(torch.autograd.Function):
    """``.. k, n k -> .. n``; backward unpacks the weight again, so it is in full precision only during a matmul."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.k = x.shape[-1]
        return x @ unpack_nf4(packed, ctx.k, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        """``dx = dy w``; the weight is frozen."""
        (packed,) = ctx.saved_tensors
        (dy,) = gradients
        return dy @ unpack_nf4(packed, ctx.k, dy.dtype), None


class Nf4Linear(nn.Linear):
    """A frozen linear layer with its weight in four bits: ``.. k -> .. n``, in the dtype of its input.

    ``weight`` is the packed tensor, of bytes; the bias is not changed.
    """

    def __init__(self, in_features: int, out_features: int, bias: Tensor | None, device: Any = None) -> None:
        """Raises:
        ValueError: if ``in_features`` is not a multiple of the block size.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        shape = (out_features, packed_bytes(in_features))
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.uint8, device=device), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]

    @classmethod
    def of(cls, linear: nn.Linear) -> Nf4Linear:
        """Return a layer's packed twin; one on the meta device has no values yet."""
        bias = None if linear.bias is None else linear.bias.detach()
        made = cls(linear.in_features, linear.out_features, bias, linear.weight.device)
        if not linear.weight.is_meta:
            made.weight.data = pack_nf4(linear.weight.detach())
        return made

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = _Multiply.apply(input, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, nf4"
