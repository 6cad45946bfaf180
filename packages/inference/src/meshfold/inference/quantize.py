"""Linear layers whose weights are kept in eight or four bits, for generation.

======== ======================================== ============================================== ==============
format   codes                                    scale, float32                                 bytes a weight
======== ======================================== ============================================== ==============
``int8`` int8, -127 to 127                        of a row (an output): largest magnitude / 127  1
``fp8``  float8_e4m3fn                            of a row: largest magnitude / 448              1
``int4`` two a byte, -7 to 7 (+ 8), the first of  of ``group`` elements of a row: largest        0.5
         a pair in the lower half                 magnitude / 7                                  + 4 / group
======== ======================================== ============================================== ==============

A weight is ``(codes · scale)``, computed in float32 and rounded to the dtype that it had. It is made at each use; but a single row
on a GPU is multiplied with the codes by a Triton kernel, and compiled blocks (``Generator(..., compile=True)``) make the weight
inside of the product.

Under tensor parallelism each rank packs its block: a row that is split over ranks gets the scale of the whole row, and groups of
int4 must lie within a block. So the codes of a rank are those of the whole weight, cut.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from meshfold.inference.products import is_one_row, multiply
from meshfold.mesh import SpecError, all_reduce, did_you_mean, metadata
from meshfold.mesh.spec import argument_checks as settings
from meshfold.tensor_parallel import Linear

LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
"""Formats, with the largest code of each."""


@dataclass(frozen=True)
class Quantized:
    """Report of :func:`quantize`.

    Attributes:
        layers: names of the layers that are packed.
        bytes: of their codes and scales on this rank.
        bytes_before: of their weights on this rank.
    """

    layers: tuple[str, ...]
    bytes: int
    bytes_before: int


@torch.no_grad()
def quantize(model: nn.Module, form: str, *, group: int = 128) -> Quantized:
    """Pack the weights of a model's linear layers in place, split over ranks or not. All ranks must call.

    The model can generate afterwards, but not train. Packed are ``torch.nn.Linear`` and the layers that tensor parallelism makes of
    it, but for those that share their weight with another module (a tied head).

    Args:
        model: with real weights; not one whose parameters ZeRO has put into chunks.
        form: "int8", "fp8" or "int4".
        group: elements of a row that share a scale in int4.

    Raises:
        SpecError: for an unknown format, a group that does not divide the rows on a rank, or a weight that is not there.
    """
    if form not in LARGEST:
        raise SpecError(f"quantize {form!r}: write one of {', '.join(LARGEST)}.{did_you_mean(form, LARGEST)}")
    settings.count("group", group)
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    found = [(name, module) for name, module in model.named_modules() if _can_pack(module, uses)]
    for name, module in found:
        _check(name, module.weight, form, group)
    before = after = 0
    for _, module in found:
        weight: Tensor = module.weight
        codes, scale = pack(weight, form, group, _largest(weight, form, group))
        before, after = before + weight.nbytes, after + codes.nbytes + scale.nbytes
        del module._parameters["weight"]
        module.register_buffer("codes", codes)
        module.register_buffer("scale", scale)
        module.weight_dtype = weight.dtype
        module.__class__ = _with_packed_weight(cast(Any, type(module)))
    return Quantized(tuple(name for name, _ in found), after, before)


def pack(weight: Tensor, form: str, group: int, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes ``n k`` (int4: ``n k/2``) and scales ``n 1`` (int4: ``n k/group``) of a weight ``n k``.

    Args:
        weight: what to pack.
        form, group: as for :func:`quantize`.
        largest: float32, the magnitudes that the largest code stands for, of the shape of the scales.
    """
    scale = torch.where(largest > 0, largest / LARGEST[form], 1.0)
    if form == "int4":
        n, k = weight.shape
        levels = (weight.float().view(n, k // group, group) / scale.unsqueeze(-1)).round().clamp(-7, 7).view(n, k) + 8
        pairs = levels.to(torch.uint8).view(n, k // 2, 2)
        return pairs[..., 0] | pairs[..., 1] << 4, scale
    values = weight.float() / scale
    if form == "fp8":
        return values.clamp(-448, 448).to(torch.float8_e4m3fn), scale
    return values.round().clamp(-127, 127).to(torch.int8), scale


def unpack(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight ``n k`` that codes and scales stand for."""
    if codes.dtype == torch.uint8:
        n, k = codes.shape[0], 2 * codes.shape[1]
        levels = torch.stack((codes & 15, codes >> 4), -1).view(n, scale.shape[1], k // scale.shape[1])
        return ((levels.float() - 8) * scale.unsqueeze(-1)).view(n, k).to(dtype)
    return (codes.float() * scale).to(dtype)


def _can_pack(module: nn.Module, uses: Counter[int]) -> bool:
    # The other class is of torch's own attention, which takes the weight by itself.
    if not isinstance(module, nn.Linear | Linear) or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    if getattr(module, "stored", "nk") != "nk":
        return False
    weight = module._parameters.get("weight")
    known = None if weight is None else metadata(weight)
    if weight is None or not weight.is_floating_point():
        return False
    return uses[id(weight)] == 1 and not (known is not None and known.tie)


def _check(name: str, weight: Tensor, form: str, group: int) -> None:
    """Refuse what cannot be packed, before anything is."""
    if weight.is_meta or weight.dim() != 2 or not weight.numel():
        raise SpecError(
            f"{name}: its weight of shape {list(weight.shape)} is not there to be packed; ZeRO stage 3 has it in chunks, say. "
            "Leave zero out to generate with packed weights"
        )
    if form == "int4" and (weight.shape[1] % group or group % 2):
        fits = [g for g in (128, 64, 32, 16) if not weight.shape[1] % g]
        advice = f"write group={fits[0]}" if fits else "use int8 or fp8"
        raise SpecError(
            f"{name}: groups of {group} do not divide the {weight.shape[1]} columns of its weight on a rank, so a group would lie "
            f"on two; {advice}, or a smaller size of tensor"
        )


def _largest(weight: Tensor, form: str, group: int) -> Tensor:
    """Return the largest magnitudes of rows or groups, of whole rows where ranks share them."""
    n, k = weight.shape
    if form == "int4":
        return weight.float().view(n, k // group, group).abs().amax(-1)
    found = weight.float().abs().amax(-1, keepdim=True)
    known = metadata(weight)
    if known is None or known.mesh.size(*known.placement.axes[1]) == 1:
        return found
    return all_reduce(found, known.mesh.group(*known.placement.axes[1]), "max")


def _weight(module: nn.Module) -> Tensor:
    return unpack(module.codes, module.scale, module.weight_dtype)  # type: ignore[arg-type]


@functools.cache
def _with_packed_weight(base: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a layer whose weight is made at each use: one for all layers of a class, which share compiled code."""
    more = {"forward": _forward} if base.forward is nn.Linear.forward else {}
    return type(f"Quantized{base.__name__}", (base,), {"weight": property(_weight), "__doc__": base.__doc__, **more})


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    if is_one_row(x):
        return multiply(module.codes, module.bias, module.scale, x)  # type: ignore[arg-type]
    return F.linear(x, module.weight, module.bias)
