"""A Hugging Face model from a local folder, whose weights are read directly into their shards.

    engine = Engine(pretrained("models/llama"), parallel=dict(data=2, tensor=4), ...)

The model is built on the meta device, split, cut into stages and put into chunks, like a model that a function builds. Then each
rank reads its own blocks, tensor by tensor, from the memory-mapped files. No rank ever holds more than its own part and one more
tensor.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.tensors import has_weights, open_weights, verify_checksums
from meshfold.engine.model import Loaded, SourceValues, WeightSource
from meshfold.huggingface.adapter import NF4, Adapter, pack_linears, unpacked_twins
from meshfold.huggingface.folder_config import read_config, read_raw_config, require_config
from meshfold.huggingface.packed_folder import PackedFiles, Packing, read_packing, shard_packed
from meshfold.huggingface.weight_names import Matched, match
from meshfold.kernels import PackedWeight, keep_packed, pack_nf4
from meshfold.mesh import ParallelSpec, SpecError, did_you_mean, metadata
from meshfold.mesh.initialization import ParameterInit

_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Settings of transformers that are no fields of a configuration."""


class Pretrained(WeightSource):
    """A model of a folder before it is built. Called, it builds the model with fresh weights; an engine loads them.

    Attributes:
        folder: where.
        config: transformers' configuration, with the requested changes.
        model_class: makes the model from it.
        keeps_packed: the folder has packed weights, and the model keeps them so.
    """

    def __init__(
        self,
        folder: Path,
        config: Any,
        model_class: Any,
        dtype: torch.dtype,
        *,
        ignore_mismatched_sizes: bool,
        adapter: Adapter | None = None,
        quantize: str | None = None,
        packing: Packing | None = None,
        dequantize: bool = False,
        verify: bool = True,
    ) -> None:
        self.adapter, self.quantize, self._verifies = adapter, quantize, verify
        self.folder, self.config, self.model_class = folder, config, model_class
        self._dtype, self._ignores = dtype, ignore_mismatched_sizes
        self._files = _open(folder)
        self._packed = None if packing is None else PackedFiles(self._files, packing)
        self.keeps_packed = packing is not None and not dequantize

    def __call__(self) -> nn.Module:
        """Return the model with fresh weights."""
        if hasattr(self.model_class, "from_config"):
            model: nn.Module = self.model_class.from_config(self.config, dtype=self._dtype, trust_remote_code=False)
        else:
            model = self.model_class._from_config(self.config, dtype=self._dtype)
        if self.quantize is not None:
            pack_linears(model)
        if self.keeps_packed:
            model.requires_grad_(False)
        return model if self.adapter is None else self.adapter.put_on(model)

    def check(self, spec: ParallelSpec) -> None:
        """Raise a SpecError for a spec that such a model does not support."""
        if self.quantize is not None and spec.tensor is not None:
            raise SpecError(
                f"quantize={self.quantize!r} with tensor: packed weights are not split over tensor axes; share the model with "
                "data=... and zero=dict(stage=3), or cut it into stages"
            )
        if self.keeps_packed and spec.zero is not None:
            raise SpecError(
                f"model {str(self.folder)!r} keeps its weights packed, and zero has weights in chunks: leave zero out, or give "
                "pretrained(folder, dequantize=True)"
            )

    def verify(self, part: int, parts: int) -> None:
        """Compare every ``parts``-th tensor with its checksum, from number ``part`` on, if the files have any.

        Raises:
            CheckpointError: for one that differs from what was written.
        """
        if self._verifies:
            verify_checksums(self._files, part, parts)

    def weights(self, model: nn.Module) -> FolderValues:
        """Return the folder's values for a model that this has built, whole, on the meta device or not.

        Raises:
            SpecError: if it has none of its tensors, or other shapes.
        """
        base = model if self.adapter is None else self.adapter.base_of(model)
        name, wanted = type(base).__name__, base.state_dict(keep_vars=True)
        names = {key: key for key in wanted}
        if self.adapter is not None:
            names, wanted = self.adapter.names_of(model)
        twins = unpacked_twins(model)
        wanted = {key: twins.get(value, value) for key, value in wanted.items()}
        files = self._files if self._packed is None else self._packed
        try:
            found = match(base, files if self._packed is None else self._packed.described(), wanted)
        except CheckpointError as error:
            raise SpecError(f"model {str(self.folder)!r}: its weights cannot be loaded: {error}") from error
        if not found.recipes:
            raise SpecError(
                f"model {str(self.folder)!r}: none of its {len(self._files)} tensors is one of {name} "
                f"({next(iter(self._files), 'there is none')!r}, say): give the model_class that it is of"
            )
        if found.mismatched and not self._ignores:
            listed = "; ".join(
                f"{key} is {there} in the folder and {here} in the model"
                for key, (there, here) in found.mismatched.items()
            )
            raise SpecError(
                f"model {str(self.folder)!r}: {listed}. Change the configuration back, or have them initialized with "
                "pretrained(folder, ignore_mismatched_sizes=True)"
            )
        if twins and found.missing:
            raise SpecError(
                f"model {str(self.folder)!r}: {found.missing[0]!r} is missing, so it cannot be a frozen base"
            )
        values = FolderValues(name, self.folder, files, found, base, names)
        if self.keeps_packed:
            values.keep_packed_weights()
        if self.adapter is not None:
            values.more = self.adapter.values(model)
        return values


class FolderValues(SourceValues):
    """First values of a model's tensors from a folder.

    Attributes:
        report: which tensors were found.
        more: tensors from elsewhere, by their names in the model: an adapter's.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        files: Mapping[str, Tensor],
        found: Matched,
        model: nn.Module,
        names: Mapping[str, str],
    ) -> None:
        """Args:
        names: from a tensor's name in the model that is trained to its name in the folder's model.
        """
        self._files, self._found, self._model, self._names = files, found, model, names
        self.more: Mapping[str, Tensor] = {}
        self._kept: dict[str, str] = {}
        self.report = Loaded(
            name=name,
            folder=str(folder),
            tensors=found.tensors,
            new=tuple(found.missing),
            unused=tuple(found.unexpected),
            mismatched=found.mismatched,
        )

    def keep_packed_weights(self) -> None:
        """Keep the folder's packed weights packed for linear layers that can read them; unpack the others."""
        for name, recipe in self._found.recipes.items():
            source, layer = recipe.sources[0][0], self._model.get_submodule(name.rpartition(".")[0])
            if recipe.converter is None and self._packed_files.is_packed(source) and isinstance(layer, nn.Linear):
                self._kept[name] = source

    @property
    def _packed_files(self) -> PackedFiles:
        assert isinstance(self._files, PackedFiles)
        return self._files

    def over(self, fresh: ParameterInit, device: torch.device) -> ParameterInit:
        """Return this rank's block of a parameter from the folder, or from ``fresh`` if missing there.

        One that stays packed has no values: :meth:`fill_buffers` puts its codes in its place.
        """
        self._device = device

        def values(name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
            if self._names.get(name) in self._kept:
                return torch.empty_like(parameter, dtype=dtype, device="meta")
            if not self._has(name):
                return fresh(name, parameter, dtype)
            return self._block(name, parameter, dtype, device)

        return values

    @torch.no_grad()
    def fill_buffers(self, model: nn.Module) -> None:
        """Set buffers to the folder's values, and put codes in the place of weights that stay packed."""
        for path, module in model.named_modules():
            weight = module._parameters.get("weight")
            source = self._kept.get(self._names.get(f"{path}.weight", ""))
            if weight is not None and source is not None:
                mine = shard_packed(f"{path}.weight", self._packed_files.packed(source), weight)
                there = {name: part.to(self._device, copy=True) for name, part in mine.parts().items()}
                keep_packed(module, PackedWeight(**there), weight.dtype)
        for name, buffer in model.named_buffers():
            if self._has(name):
                buffer.copy_(self._block(name, buffer, buffer.dtype, buffer.device))

    def warn(self) -> None:
        """Warn about missing tensors, as transformers does."""
        if not self.report.is_whole:
            warnings.warn(str(self.report), stacklevel=2)

    def _has(self, name: str) -> bool:
        return name in self.more or self._names.get(name) in self._found.recipes

    def _block(self, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        if name in self.more:
            whole = self.more[name]
        else:
            known = self._names[name]
            whole = self._found.recipes[known].make(known, self._files, self._model)
            if tensor.dtype == torch.uint8 and whole.is_floating_point():
                return pack_nf4(whole.to(device))
        meta = metadata(tensor)
        mine = whole if meta is None else meta.placement.shard(whole, meta.mesh)
        return mine.to(device=device, dtype=dtype, copy=True).contiguous()


def pretrained(
    folder: str | os.PathLike[str],
    *,
    model_class: str | type | None = None,
    dtype: torch.dtype = torch.float32,
    ignore_mismatched_sizes: bool = False,
    adapter: Any = None,
    quantize: str | None = None,
    dequantize: bool = False,
    verify: bool = True,
    **changes: Any,
) -> Pretrained:
    """Return the model of a local Hugging Face folder, to be passed to an :class:`Engine`.

    Weights are read from ``model.safetensors`` or ``pytorch_model.bin``, single or in shards with an index, when the engine is
    made. Missing tensors, such as the head of a new task, are initialised with a warning. One seed gives the same values under
    every spec. ``print(engine.loaded)`` lists them. Nothing is downloaded, and no code of the folder is run.

    Args:
        folder: with ``config.json`` and weights.
        model_class: one of transformers' classes or its name, such as ``"AutoModelForSequenceClassification"``; by default the
            configuration's ``architectures``.
        dtype: of the parameters; the engine computes in its ``precision``.
        ignore_mismatched_sizes: initialise tensors that have another shape in the folder.
        adapter: train only low-rank adapters: peft's ``LoraConfig(...)`` for new ones, or the folder of trained ones.
        quantize: ``"nf4"``: keep linear layers except the head in four bits, packed while reading (QLoRA); with ``adapter``.
        dequantize: unpack the weights of a folder that AWQ, GPTQ, compressed-tensors or fp8 have packed, to train them, say. By
            default linear layers keep the stored codes, for generation: sharded along their groups, without gradients.
        verify: compare tensors with their checksums first, if the files have any (those written by Meshfold and torch); the
            ranks divide this work.
        changes: to the configuration: ``num_labels=3``; ``attn_implementation`` and ``experts_implementation`` as in
            transformers.

    Raises:
        SpecError: if the folder has no configuration, no weights, or damaged ones, or transformers lacks the class.
    """
    path, shown = Path(folder), str(folder)
    require_config(folder, f"pretrained({shown!r})")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise SpecError(f"pretrained(dtype={dtype!r}): give a floating-point dtype, such as torch.float32")
    if quantize not in (None, NF4):
        raise SpecError(f"pretrained(quantize={quantize!r}): {NF4!r}, or None")
    if quantize is not None and adapter is None:
        raise SpecError(
            f"pretrained(quantize={quantize!r}) freezes the model: give adapter=LoraConfig(...), which is then trained"
        )
    config = read_config(path, f"pretrained({shown!r})")
    packing = read_packing(read_raw_config(path), shown)
    if packing is None and dequantize:
        raise SpecError(f"pretrained({shown!r}, dequantize=True): its weights are not packed; leave dequantize out")
    if packing is not None:
        if adapter is not None and not dequantize:
            raise SpecError(
                f"pretrained({shown!r}, adapter=...): its weights are packed by {packing.method}; give dequantize=True, or "
                f"dequantize=True and quantize={NF4!r}, to train an adapter on them"
            )
        vars(config).pop("quantization_config", None)  # transformers would look for the library
    for key, value in changes.items():
        if key in _IMPLEMENTATIONS:
            setattr(config, f"_{key}", value)
            continue
        if not hasattr(config, key):
            raise SpecError(
                f"pretrained({key}=...): {type(config).__name__} has no {key!r}.{did_you_mean(key, config.to_dict())}"
            )
        setattr(config, key, value)
    if getattr(config, "is_encoder_decoder", False) or hasattr(config, "use_cache"):
        config.use_cache = False  # for training; generation asks for the cache itself
    if not has_weights(path):
        raise SpecError(
            f"pretrained({shown!r}): the folder has no weights (model.safetensors or pytorch_model.bin); to begin with fresh "
            "ones give the engine a function that builds the model"
        )
    return Pretrained(
        path,
        config,
        _class_of(shown, config, model_class),
        dtype,
        ignore_mismatched_sizes=ignore_mismatched_sizes,
        adapter=None if adapter is None else Adapter.of(adapter),
        quantize=quantize,
        packing=packing,
        dequantize=dequantize,
        verify=verify,
    )


def _open(folder: Path) -> Mapping[str, Tensor]:
    try:
        return open_weights(folder)
    except CheckpointError as error:
        raise SpecError(f"model {str(folder)!r}: its weights cannot be loaded: {error}") from error


def _class_of(shown: str, config: Any, asked: str | type | None) -> Any:
    """Return the class that makes the model."""
    import transformers

    if isinstance(asked, type):
        return asked
    architectures = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
    names = [asked] if asked else architectures if isinstance(architectures, list) else [architectures]
    found = getattr(transformers, str(names[0]), None)
    if not isinstance(found, type) or not (hasattr(found, "_from_config") or hasattr(found, "from_config")):
        where = "model_class" if asked else "config.json's architectures"
        raise SpecError(
            f"pretrained({shown!r}): transformers has no model class {names[0]!r}, which {where} says: give "
            "model_class='AutoModelForCausalLM' or another of its classes"
        )
    return found
