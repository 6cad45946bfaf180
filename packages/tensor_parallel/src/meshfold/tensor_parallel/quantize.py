"""Linear layers whose weights are kept in eight or four bits, for generation.

The formats are those of :mod:`meshfold.kernels.packed_weight`. A weight is unpacked at each use, with two exceptions. A Triton
kernel multiplies a single row on a GPU with the codes. Compiled blocks (``Generator(..., compile=True)``) unpack the weight inside
the product.

Under tensor parallelism each rank packs its block: a row that is split over ranks gets the scale of the whole row, and groups of
int4 must lie within a block. A rank's codes are thus a slice of the whole weight's codes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from meshfold.kernels import PACKED_FORMATS, keep_packed, largest_magnitudes, pack_weight, packed_weight_of
from meshfold.mesh import SpecError, all_reduce, did_you_mean, metadata
from meshfold.mesh.spec import argument_checks as settings
from meshfold.tensor_parallel.layers import Linear


@dataclass(frozen=True)
class Quantized:
    """Report of a model's packed weights.

    Attributes:
        layers: names of the layers that are packed.
        bytes: of their codes and scales on this rank.
        bytes_before: of their weights on this rank.
    """

    layers: tuple[str, ...]
    bytes: int
    bytes_before: int

    @classmethod
    def of(cls, model: nn.Module) -> Quantized:
        """Return the report of a packed model, from :func:`quantize` or from a folder that had packed weights."""
        layers, held, before = [], 0, 0
        for name, module in model.named_modules():
            packed = packed_weight_of(module)
            if packed is not None:
                layers.append(name)
                held += packed.bytes
                before += packed.shape[0] * packed.shape[1] * cast(torch.dtype, module.weight_dtype).itemsize
        return cls(tuple(layers), held, before)


@torch.no_grad()
def quantize(model: nn.Module, form: str, *, group: int = 128) -> Quantized:
    """Pack the weights of a model's linear layers in place, split over ranks or not. All ranks must call.

    The model can generate afterwards, but not train. This packs ``torch.nn.Linear`` and the layers that tensor parallelism makes of
    it, except layers that share their weight with another module (a tied head).

    Args:
        model: with real weights; not one whose parameters ZeRO has put into chunks.
        form: "int8", "fp8" or "int4".
        group: elements of a row that share a scale in int4.

    Raises:
        SpecError: for an unknown format, a group that does not divide the rows on a rank, or a weight that is not there.
    """
    if form not in PACKED_FORMATS:
        raise SpecError(
            f"quantize {form!r}: write one of {', '.join(PACKED_FORMATS)}.{did_you_mean(form, PACKED_FORMATS)}"
        )
    settings.count("group", group)
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    found = [(name, module) for name, module in model.named_modules() if _can_pack(module, uses)]
    for name, module in found:
        _check(name, module.weight, form, group)
    for _, module in found:
        weight: Tensor = module.weight
        keep_packed(module, pack_weight(weight, form, group, _largest(weight, form, group)), weight.dtype)
    return Quantized.of(model)


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
    found = largest_magnitudes(weight, form, group)
    known = metadata(weight)
    if form == "int4" or known is None or known.mesh.size(*known.placement.axes[1]) == 1:
        return found
    return all_reduce(found, known.mesh.group(*known.placement.axes[1]), "max")
