"""Folders whose linear layers another library has packed, read as :class:`meshfold.kernels.PackedWeight`.

===================== ============================================= =========================================================
``quant_method``      tensors of a layer                            weight ``n k``
===================== ============================================= =========================================================
``awq`` (gemm)        qweight ``k n/8``, qzeros ``g n/8``,          (q - z) · s; eight columns of a word in the order
                      scales ``g n``                                0 2 4 6 1 3 5 7 (Lin et al., arXiv 2306.00978)
``gptq``              qweight ``k/8 n``, qzeros ``g n/8``,          (q - z - 1) · s, without the 1 in ``gptq_v2``; g_idx has the
                      scales ``g n``, g_idx ``k``                   group of each column (Frantar et al., arXiv 2210.17323)
``compressed-         weight_packed ``n k/8``, or weight in int8 or (q - z) · s; codes of four bits have 8 added; the scale is
tensors``             fp8; weight_scale, weight_zero_point          of a tensor, a row, a group or a block
``fp8``               weight in fp8, weight_scale_inv, or           q · s, of blocks of 128 x 128 or of a tensor, as DeepSeek and
                      weight_scale                                  Qwen3 have it
===================== ============================================= =========================================================

Codes of four and of eight bits are read; activations are never quantised here, whatever the folder says of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import PackedWeight, two_a_byte
from meshfold.mesh import SpecError, metadata

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight columns."""
_LEAVES = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
    ),
    "fp8": ("weight", "weight_scale_inv", "weight_scale"),
}
"""Tensors of a packed layer, by method."""
_ALIASES = {"fbgemm_fp8": "fp8", "compressed_tensors": "compressed-tensors"}
_MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
"""Tensors that only a packed layer has."""
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense", "mixed-precision")
_IGNORED = ("input_scale", "input_zero_point", "activation_scale", "output_scale", "k_scale", "v_scale")
"""Tensors for activations and for keys and values in eight bits."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Method by which a folder's layers are packed.

    Attributes:
        method: a key of the module's table.
        bits: of a code, where the method says it.
        zero_offset: is added to stored zero points.
        block: rows that share a scale, where blocks do.
    """

    method: str
    bits: int = 4
    zero_offset: int = 0
    block: int = 128


def read_packing(told: Mapping[str, Any], shown: str) -> Packing | None:
    """Return the method of a ``config.json``; None if its weights are not packed.

    Raises:
        SpecError: for a method, or a variant of one, that cannot be read.
    """
    settings = _settings(told)
    if settings is None:
        return None
    method = str(settings.get("quant_method", ""))
    method, what = _ALIASES.get(method, method), f"model {shown!r}: its weights are packed by {method!r}"
    if method not in _LEAVES:
        raise SpecError(
            f"{what}, which is not read here; {', '.join(_LEAVES)} are. Load the model with transformers, call dequantize() and "
            "save it, and give that folder"
        )
    bits = settings.get("bits", 4)
    if method in ("awq", "gptq") and bits not in ((4,) if method == "awq" else (4, 8)):
        raise SpecError(f"{what} with bits={bits}: codes of 4 bits are read{' and of 8' if method == 'gptq' else ''}")
    version = str(settings.get("version", "gemm")).lower()
    if method == "awq" and version not in ("gemm", "exllama"):
        raise SpecError(f"{what} with version={version!r}: the layout 'gemm' is read")
    stored = settings.get("checkpoint_format", "gptq")
    if method == "gptq" and stored not in ("gptq", "gptq_v2"):
        raise SpecError(f"{what} with checkpoint_format={stored!r}: 'gptq' and 'gptq_v2' are read")
    offset = 1 if method == "gptq" and stored == "gptq" else 0
    block = _block(method, settings, what)
    return Packing(method=method, bits=bits, zero_offset=offset, block=block)


def is_packed(told: Mapping[str, Any] | None) -> bool:
    """Return True if a ``config.json`` says that some library has packed the weights."""
    return told is not None and _settings(told) is not None


def _settings(told: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: Any = told.get("quantization_config", told.get("compression_config"))
    return found if isinstance(found, Mapping) else None


def _block(method: str, settings: Mapping[str, Any], what: str) -> int:
    """Return the rows of a block; refuse formats of compressed-tensors that are not read."""
    found: Any = settings.get("weight_block_size")
    if method == "compressed-tensors":
        groups = [group for group in (settings.get("config_groups") or {}).values() if isinstance(group, Mapping)]
        formats = {settings.get("format", "pack-quantized"), *(group.get("format") for group in groups)} - {None}
        odd = sorted(str(form) for form in formats if form not in _FORMATS)
        sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
        if odd or sparse != "dense":
            raise SpecError(f"{what} with format={(odd or [sparse])[0]!r}: {', '.join(_FORMATS[:4])} are read")
        found = next((b for g in groups if (b := (g.get("weights") or {}).get("block_structure"))), None)
    return int(found[0]) if isinstance(found, list | tuple) and found else 128


class PackedFiles(Mapping[str, Tensor]):
    """Tensors of a folder with packed layers, by the names that they would have unpacked: ``LAYER.weight`` for all of a layer's.

    A packed weight that is looked up is unpacked, in float32.
    """

    def __init__(self, files: Mapping[str, Tensor], packing: Packing) -> None:
        self._files, self._packing = files, packing
        leaves, found = _LEAVES[packing.method], {}
        for key in files:
            layer, _, leaf = key.rpartition(".")
            if leaf in _MARKS and leaf in leaves:
                found[f"{layer}.weight"] = {part: f"{layer}.{part}" for part in leaves if f"{layer}.{part}" in files}
        self._layers: dict[str, dict[str, str]] = found
        hidden = {key for parts in found.values() for key in parts.values()}
        plain = (key for key in files if key not in hidden and key.rpartition(".")[2] not in _IGNORED)
        self._names = dict.fromkeys((*plain, *found))

    def __getitem__(self, name: str) -> Tensor:
        return self.packed(name).unpack(torch.float32) if name in self._layers else self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def is_packed(self, name: str) -> bool:
        """Return True for a weight in codes."""
        return name in self._layers

    def described(self) -> dict[str, Tensor]:
        """Return all tensors, packed weights on the meta device: shapes without reading."""
        return {
            name: torch.empty(self._shape(name), device="meta") if name in self._layers else self._files[name]
            for name in self
        }

    def packed(self, name: str) -> PackedWeight:
        """Read a weight in codes.

        Raises:
            SpecError: if its tensors do not fit together, or are packed in a way that is not read.
        """
        parts = {part: self._files[key] for part, key in self._layers[name].items()}
        reader = {"awq": _read_awq, "gptq": _read_gptq}.get(self._packing.method, _read_rows)
        try:
            found = reader(parts, self._packing)
        except (KeyError, RuntimeError) as error:
            raise SpecError(
                f"{name}: cannot be read as {self._packing.method}: its tensors are "
                f"{', '.join(f'{part} {list(tensor.shape)}' for part, tensor in parts.items())} ({error})"
            ) from error
        if found.shape[1] % found.scale.shape[1] or found.group % found.per_byte:
            raise SpecError(
                f"{name}: {found.shape[1]} columns in {found.scale.shape[1]} groups: only groups of one size are read; give "
                "dequantized weights"
            )
        return found

    def _shape(self, name: str) -> tuple[int, int]:
        shapes = {part: self._files[key].shape for part, key in self._layers[name].items()}
        per_word = 32 // self._packing.bits
        if self._packing.method == "awq":
            return shapes["qweight"][1] * per_word, shapes["qweight"][0]
        if self._packing.method == "gptq":
            return shapes["qweight"][1], shapes["qweight"][0] * per_word
        if "weight_packed" in shapes:
            n, k = self._files[self._layers[name]["weight_shape"]].tolist()
            return int(n), int(k)
        n, k = shapes["weight"]
        return n, k


def _nibbles(words: Tensor) -> Tensor:
    """Return the codes of four bits in int32 words, the lowest first: ``a b`` -> ``a 8b`` uint8."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def _signed(codes: Tensor) -> Tensor:
    """Return codes of eight bits less 128, as int8."""
    return (codes ^ 128).view(torch.int8)


def _read_awq(parts: Mapping[str, Tensor], packing: Packing) -> PackedWeight:
    codes, zero = (
        _nibbles(parts[name]).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1).t() for name in ("qweight", "qzeros")
    )
    scale = parts["scales"].t().float().contiguous()
    return PackedWeight(codes=two_a_byte(codes.contiguous()), scale=scale, zero=zero.contiguous())


def _read_gptq(parts: Mapping[str, Tensor], packing: Packing) -> PackedWeight:
    codes = parts["qweight"].t().contiguous().view(torch.uint8)
    zero = _nibbles(parts["qzeros"]) if packing.bits == 4 else parts["qzeros"].contiguous().view(torch.uint8)
    zero = ((zero.to(torch.int16) + packing.zero_offset) % (1 << packing.bits)).t().contiguous()
    scale = parts["scales"].t().float().contiguous()
    if packing.bits == 4:
        found = PackedWeight(codes=codes, scale=scale, zero=zero.to(torch.uint8))
    else:
        found = PackedWeight(codes=_signed(codes), scale=scale, zero=zero - 128)
    return _in_groups(found, parts.get("g_idx"))


def _read_rows(parts: Mapping[str, Tensor], packing: Packing) -> PackedWeight:
    """Read compressed-tensors and fp8, which store codes row by row."""
    given = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    zero = parts.get("weight_zero_point")
    if "weight_packed" not in parts:
        codes = parts["weight"]
        if codes.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise RuntimeError(f"codes in {codes.dtype}")
        n = codes.shape[0]
        if zero is not None:
            zero = _of_rows(zero, n, packing.block)
        return PackedWeight(codes=codes, scale=_of_rows(given.float(), n, packing.block), zero=zero)
    words, (n, k) = parts["weight_packed"], parts["weight_shape"].tolist()
    bits = next((bits for bits in (4, 8) if words.shape[1] == -(-k * bits // 32)), 0)
    if not bits or k * bits % 8:
        raise RuntimeError("codes of 4 and of 8 bits are read")
    codes, scale = words.contiguous().view(torch.uint8)[:, : k * bits // 8].contiguous(), given.float()
    if zero is not None:
        turned = zero.t()
        zero = (_nibbles(turned) if bits == 4 else turned.contiguous().view(torch.uint8))[:, :n].t().contiguous()
    if bits == 8:
        codes, zero = _signed(codes), None if zero is None else zero.to(torch.int16) - 128
    return _in_groups(PackedWeight(codes=codes, scale=scale, zero=zero), parts.get("weight_g_idx"))


def _of_rows(given: Tensor, n: int, block: int) -> Tensor:
    """Return scales, or zero points, of a tensor, of rows, or of blocks of rows, for each of n rows."""
    if given.numel() == 1:
        return given.view(1, 1).expand(n, 1).contiguous()
    if given.dim() == 1:
        given = given.unsqueeze(1)
    return given if given.shape[0] == n else given.repeat_interleave(block, 0)[:n].contiguous()


def _in_groups(packed: PackedWeight, group_of: Tensor | None) -> PackedWeight:
    """Put the columns of a group side by side, where they are not (``desc_act``, ``actorder``)."""
    k, groups = packed.shape[1], packed.scale.shape[1]
    if group_of is None or groups == 1 or (group_of < 0).all():
        return packed
    order = group_of.long().argsort(stable=True)
    if torch.equal(order, torch.arange(k)):
        return packed
    if not (group_of.bincount(minlength=groups) == k // groups).all():
        raise RuntimeError("its groups differ in size")
    levels = packed.codes
    if packed.per_byte == 2:
        levels = two_a_byte(torch.stack((levels & 15, levels >> 4), -1).flatten(1)[:, order])
    else:
        levels = levels[:, order]
    return PackedWeight(codes=levels, scale=packed.scale, zero=packed.zero, columns=order)


def shard_packed(name: str, packed: PackedWeight, weight: Tensor) -> PackedWeight:
    """Return this rank's block of a packed weight.

    Args:
        name: of the weight.
        packed: the whole.
        weight: the parameter in whose place it comes, with its placement.

    Raises:
        SpecError: on all ranks, if two ranks would share a group of columns.
    """
    meta = metadata(weight)
    if meta is None:
        return packed
    place, mesh = meta.placement, meta.mesh
    (n, k), groups = packed.shape, packed.scale.shape[1]
    unit = packed.group if groups > 1 else packed.per_byte
    for rank in range(mesh.world_size):
        segments = place.segments(mesh, 1, rank)
        if segments == [(0, k)]:
            continue
        if packed.columns is not None:
            raise SpecError(
                f"{name}: its columns are not in the order of its groups (desc_act, actorder), and tensor would split them: "
                "leave tensor out, or give a folder that was packed without"
            )
        if any(at % unit for segment in segments for at in segment):
            raise SpecError(
                f"{name}: tensor would give a rank {sum(length for _, length in segments)} of its {k} columns, which lie in groups "
                f"of {unit} that share a scale: write a smaller size of tensor, or leave it out"
            )
    rows = place.coordinates(mesh, 0)
    inside = rows < n
    columns = None if place.segments(mesh, 1) == [(0, k)] else place.coordinates(mesh, 1)

    def cut(part: Tensor, per: int) -> Tensor:
        """Return rows, and columns that each hold ``per`` columns of the weight."""
        raw = part.view(torch.uint8) if part.is_floating_point() and part.itemsize == 1 else part
        chosen = raw if columns is None or per == k else raw[:, columns[::per] // per]
        found = chosen.new_zeros(rows.shape[0], chosen.shape[1])  # rows that fill up: a scale of 0
        found[inside] = chosen[rows[inside]]
        return found.view(part.dtype)

    zero = None if packed.zero is None else cut(packed.zero, packed.group)
    return PackedWeight(
        codes=cut(packed.codes, packed.per_byte),
        scale=cut(packed.scale, packed.group),
        zero=zero,
        columns=packed.columns,
    )
