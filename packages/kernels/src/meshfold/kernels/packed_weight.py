"""Weights of linear layers in eight or four bits, for products that are not trained.

======== ==================================== ===================================================== ==============
format   codes                                scale, float32                                        bytes a weight
======== ==================================== ===================================================== ==============
``int8`` int8, -127 to 127                    of a row (an output): largest magnitude / 127         1
``fp8``  float8_e4m3fn                        of a row: largest magnitude / 448                     1
``int4`` uint8, two a byte, -7 to 7 (+ 8),    of ``group`` elements of a row: largest magnitude / 7 0.5
         the first of a pair in the lower                                                           + 4 / group
         half
======== ==================================== ===================================================== ==============

A weight is ``(code - zero) · scale``, computed in float32 and rounded once. :func:`pack_weight` makes these formats; weights that
other libraries have packed may have groups and zero points in every format, and columns in another order.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.kernels.row_product import RowWeight, is_one_row, row_product

PACKED_FORMATS = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
"""Formats of :func:`pack_weight`, with the largest code of each."""
_MIDDLE = 8
"""Zero point of four bits where none is given."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeight:
    """A weight ``n k`` in codes.

    Attributes:
        codes: int8 or float8 ``n k``; uint8 ``n k/2``, two a byte.
        scale: float32 ``n g``, of g groups of k / g neighbours in a row.
        zero: ``n g``, the code that stands for 0, of an integer dtype; None: 0, or 8 of four bits.
        columns: int64 ``k``, the column of the weight that each column of codes is; None: in order.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    columns: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        n, k = self.codes.shape
        return n, k * self.per_byte

    @property
    def per_byte(self) -> int:
        """Codes in an element of ``codes``."""
        return 2 if self.codes.dtype == torch.uint8 else 1

    @property
    def group(self) -> int:
        """Neighbours in a row that share a scale."""
        return self.shape[1] // self.scale.shape[1]

    @property
    def fits_rows(self) -> bool:
        """True if :func:`meshfold.kernels.row_product` reads it: four bits are read in words of eight codes of one group."""
        return self.per_byte == 1 or (self.group % 8 == 0 and self.group & (self.group - 1) == 0)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.parts().values())

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that there are, by name."""
        return {name: part for name, part in vars(self).items() if part is not None}

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the weight ``n k``: in one pass by Triton on a GPU, where a try gave the bits of the formula."""
        codes = self.codes
        if codes.is_cuda and not torch.compiler.is_compiling() and _takes_triton(self.kind, dtype, codes.device):
            from meshfold.kernels.packed_weight_triton import launch_unpack  # which needs Triton

            found = launch_unpack(codes, self.scale, self.zero, dtype)
            return found if self.columns is None else torch.empty_like(found).index_copy_(1, self.columns, found)
        return self.unpacked(dtype)

    @property
    def kind(self) -> tuple[torch.dtype, torch.dtype | None, torch.dtype]:
        """Dtypes of codes, zero points and scales."""
        return self.codes.dtype, None if self.zero is None else self.zero.dtype, self.scale.dtype

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the weight ``n k`` by the formula, in plain torch."""
        codes, (n, k), scale = self.codes, self.shape, self.scale
        levels = torch.stack((codes & 15, codes >> 4), -1).float() if self.per_byte == 2 else codes.float()
        levels = levels.view(n, scale.shape[1], self.group)
        if self.zero is not None:
            levels = levels - self.zero.float().unsqueeze(-1)
        elif self.per_byte == 2:
            levels = levels - _MIDDLE
        found = (levels * scale.unsqueeze(-1)).view(n, k)
        if self.columns is not None:
            found = torch.empty_like(found).index_copy_(1, self.columns, found)
        return found.to(dtype)


@functools.cache
def _takes_triton(
    kind: tuple[torch.dtype, torch.dtype | None, torch.dtype], dtype: torch.dtype, device: torch.device
) -> bool:
    """Return True if Triton unpacks such weights with the bits of the formula, tried once on a few codes."""
    codes, zero, scales = kind
    if find_spec("triton") is None or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return unpacks_alike(codes, zero, scales, dtype, device) == ""


def unpacks_alike(
    codes: torch.dtype, zero: torch.dtype | None, scales: torch.dtype, dtype: torch.dtype, device: torch.device
) -> str:
    """Unpack a few codes by Triton and by the formula; return why they are not the same, with a warning."""
    random = torch.Generator().manual_seed(0)
    given = torch.randint(0, 256, (8, 256), generator=random).to(torch.uint8)
    given = given.clamp(max=126) if codes.is_floating_point else given  # no nan of float8
    levels = torch.randint(0, 15, (8, 4), generator=random)
    tried = PackedWeight(
        codes=given.view(codes).to(device),
        scale=(torch.rand(8, 4, generator=random) + 0.5).to(device, scales),
        zero=None if zero is None else levels.to(device, zero),
    )
    try:
        from meshfold.kernels.packed_weight_triton import launch_unpack  # which needs Triton

        found = launch_unpack(tried.codes, tried.scale, tried.zero, dtype)
        reason = "" if torch.equal(found, tried.unpacked(dtype)) else "its weights are not those of the formula"
    except Exception as problem:  # of Triton's compiler
        reason = (str(problem) or type(problem).__name__).strip().split("\n")[0]
    if reason:
        warnings.warn(f"no Triton for packed weights of {codes}, which is slower: {reason}", stacklevel=2)
    return reason


def pack_weight(weight: Tensor, form: str, group: int, largest: Tensor) -> PackedWeight:
    """Return the codes of a weight ``n k``.

    Args:
        weight: what to pack.
        form: one of :data:`PACKED_FORMATS`.
        group: elements of a row that share a scale in int4; it divides k.
        largest: float32, the magnitudes that the largest code represents: ``n 1``, or ``n k/group`` in int4.
    """
    scale = torch.where(largest > 0, largest / PACKED_FORMATS[form], 1.0)
    if form == "int4":
        n, k = weight.shape
        levels = (weight.float().view(n, k // group, group) / scale.unsqueeze(-1)).round().clamp(-7, 7).view(n, k)
        return PackedWeight(codes=two_a_byte((levels + _MIDDLE).to(torch.uint8)), scale=scale)
    values = weight.float() / scale
    if form == "fp8":
        return PackedWeight(codes=values.clamp(-448, 448).to(torch.float8_e4m3fn), scale=scale)
    return PackedWeight(codes=values.round().clamp(-127, 127).to(torch.int8), scale=scale)


def two_a_byte(levels: Tensor) -> Tensor:
    """Return codes of four bits, ``n k`` uint8 from 0 to 15, as ``n k/2``, the first of a pair in the lower half."""
    return levels[:, ::2] | levels[:, 1::2] << 4


def largest_magnitudes(weight: Tensor, form: str, group: int) -> Tensor:
    """Return the largest magnitudes of a weight's rows, or groups in int4, float32, for :func:`pack_weight`."""
    groups = weight.shape[1] // group if form == "int4" else 1
    return weight.float().view(weight.shape[0], groups, -1).abs().amax(-1)


def keep_packed(layer: nn.Module, packed: PackedWeight, dtype: torch.dtype) -> None:
    """Put a packed weight in the place of a layer's ``weight``, which is then made of the codes at each use.

    One row on a GPU is multiplied with the codes by a Triton kernel, in layers that are ``torch.nn.Linear``. The codes are buffers
    that no state dict has.

    Args:
        layer: whose forward reads ``self.weight``.
        packed: its weight.
        dtype: of the weight when it is used; the layer's ``weight_dtype``.
    """
    del layer._parameters["weight"]
    for name in ("codes", "scale", "zero", "columns"):
        layer.register_buffer(name, getattr(packed, name), persistent=False)
    layer.weight_dtype = dtype  # type: ignore[assignment]
    layer.__class__ = _packed_class(cast(Any, type(layer)))


def packed_weight_of(layer: nn.Module) -> PackedWeight | None:
    """Return a layer's packed weight; None if it has none."""
    if not getattr(type(layer), "has_packed_weight", False):
        return None
    return PackedWeight(codes=layer.codes, scale=layer.scale, zero=layer.zero, columns=layer.columns)  # type: ignore[arg-type]


def _weight(layer: Any) -> Tensor:
    return PackedWeight(codes=layer.codes, scale=layer.scale, zero=layer.zero, columns=layer.columns).unpack(
        layer.weight_dtype
    )


@functools.cache
def _packed_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a layer whose weight is made at each use: one for all layers of a class, which share compiled code."""
    more: dict[str, Any] = {"forward": _forward} if base.forward is nn.Linear.forward else {}
    return type(
        f"Packed{base.__name__}",
        (base,),
        {"weight": property(_weight), "has_packed_weight": True, "__doc__": base.__doc__, **more},
    )


def _forward(layer: Any, x: Tensor) -> Tensor:
    if is_one_row(x) and packed_weight_of(layer).fits_rows:  # type: ignore[union-attr]
        if layer.columns is not None:
            x = x.index_select(-1, layer.columns)
        return row_product(x, RowWeight(layer.codes, layer.bias, layer.scale, layer.zero))
    return F.linear(x, layer.weight, layer.bias)
