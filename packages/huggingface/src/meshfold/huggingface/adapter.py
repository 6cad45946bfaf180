"""Low-rank adapters on a frozen model: LoRA through peft, under any spec.

    engine = Engine(pretrained("models/llama", adapter=LoraConfig(r=8, target_modules=["q_proj", "v_proj"])), ...)
    ...
    save_adapter(engine, "adapter/")          # what peft's PeftModel.from_pretrained(model, "adapter/") reads

Only adapters have gradients and optimizer states. Under tensor parallelism they are split like their layers
(:mod:`meshfold.tensor_parallel.convert.lora`); under ``zero`` they and the frozen weights are in separate chunks.

QLoRA (Dettmers et al. 2023, arXiv 2305.14314) packs the frozen linear layers into four bits. The packed weights are parameters
of bytes without gradients, so ``zero`` shards, moves and gathers them like any others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.files import write_atomically
from meshfold.checkpoint.folder import LOCK_FILE, hold_lock
from meshfold.checkpoint.tensors import (
    TensorInfo,
    TensorWriter,
    check_inside_folder,
    open_tensors,
    verify_checksums,
)
from meshfold.engine.world import fail_together
from meshfold.kernels import NF4_BLOCK, Nf4Linear
from meshfold.mesh import SpecError, broadcast

if TYPE_CHECKING:
    from meshfold.engine import Engine

_FILE, _NAME = "adapter_model.safetensors", "default"
_BASE = "base_layer."
NF4 = "nf4"


class Adapter:
    """An adapter for a model: peft's configuration, and trained values if there are any."""

    def __init__(self, config: Any, folder: Path | None) -> None:
        self.config, self.folder = config, folder

    @classmethod
    def of(cls, asked: Any) -> Adapter:
        """Make an adapter from the user's argument.

        Raises:
            SpecError: if it is neither a configuration nor a folder of peft, or peft is not installed.
        """
        try:
            from peft import PeftConfig
        except ImportError:
            raise SpecError("adapter=... needs peft: pip install meshfold[peft]") from None
        if isinstance(asked, PeftConfig):
            return cls(asked, None)
        if not isinstance(asked, str | os.PathLike):
            raise SpecError(
                f"adapter={asked!r}: give peft's LoraConfig(...), or the folder of an adapter that peft wrote"
            )
        folder = Path(asked)
        if not (folder / "adapter_config.json").is_file() or not (folder / _FILE).is_file():
            raise SpecError(f"adapter={str(asked)!r}: no folder with adapter_config.json and {_FILE}, as peft writes")
        try:
            check_inside_folder(folder / "adapter_config.json", folder)
            config = PeftConfig.from_pretrained(str(folder))
            config.inference_mode = False
        except Exception as error:  # from peft, or from the files that it reads
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise SpecError(f"adapter={str(asked)!r}: its adapter_config.json cannot be read: {reason}") from error
        return cls(config, folder)

    def put_on(self, model: nn.Module) -> nn.Module:
        """Return peft's model around a model, which may be on the meta device."""
        from peft import get_peft_model

        try:
            made: nn.Module = get_peft_model(model, self.config)
        except ValueError as error:  # target modules that do not exist
            raise SpecError(f"adapter: {str(error).partition(chr(10))[0]}") from error
        return made

    @staticmethod
    def base_of(model: Any) -> Any:
        """Return transformers' model within peft's."""
        return model.get_base_model()

    def names_of(self, model: Any) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Return names in peft's model with those in the bare one, and the bare one's tensors by these."""
        base = self.base_of(model)
        whole: dict[Tensor, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            whole.setdefault(tensor, []).append(name)
        names, wanted = {}, {}
        for name, tensor in base.state_dict(keep_vars=True).items():
            if ".lora_" in name:
                continue
            bare = name.replace(_BASE, "")
            wanted[bare] = tensor
            names.update(dict.fromkeys(whole[tensor], bare))
        return names, wanted

    def files(self) -> Mapping[str, Tensor]:
        """Return the tensors of the folder, by their names there; none of a new adapter.

        Raises:
            SpecError: if they are damaged.
        """
        if self.folder is None:
            return {}
        try:
            found = open_tensors(self.folder, _FILE)
            verify_checksums(found, 0, 1)
        except CheckpointError as error:
            raise SpecError(f"adapter {str(self.folder)!r}: {error}") from error
        return found

    def values(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the trained values by their names in the model; none of a new adapter.

        Raises:
            SpecError: if the folder lacks some, or has others.
        """
        if self.folder is None:
            return {}
        files = self.files()
        wanted = {name.replace(f".{_NAME}.", "."): name for name in _adapter_names(model)}
        if wanted.keys() != files.keys():
            odd = sorted(wanted.keys() ^ files.keys())
            raise SpecError(
                f"adapter {str(self.folder)!r} belongs to another model: {odd[0]!r} is in only one of the two, and "
                f"{len(odd) - 1} more"
            )
        for bare, name in wanted.items():
            here, there = tuple(model.state_dict()[name].shape), tuple(files[bare].shape)
            if here != there:
                raise SpecError(f"adapter {str(self.folder)!r}: {bare!r} is {there} there and {here} in the model")
        return {name: files[bare] for bare, name in wanted.items()}


def _adapter_names(model: nn.Module) -> list[str]:
    return [name for name in model.state_dict() if ".lora_" in name]


def save_adapter(engine: Engine, path: str | os.PathLike[str]) -> None:
    """Write an engine's adapter as a peft folder: whole tensors, whatever the spec. All ranks must call.

    Raises:
        CheckpointError: if the engine's model has none, or rank 0 cannot write.
    """
    world, folder = engine.world, Path(path)
    config = getattr(engine.model, "peft_config", {}).get(_NAME)
    if config is None:
        raise CheckpointError(
            "save_adapter(): the engine's model has no adapter; make it with pretrained(folder, adapter=LoraConfig(...))"
        )
    whole: dict[str, Tensor] = {}
    for name, source in engine.model_state.sources().items():
        if ".lora_" in name:
            value = source.read()
            whole[name] = (value if source.alike else broadcast(value, world.everyone, 0)).to("cpu", copy=True)
    error: Exception | None = None
    if world.mesh.rank == 0:
        try:
            _write(folder, config, whole)
        except Exception as unwritten:
            error = unwritten
    fail_together(world, error, f"cannot write the adapter {folder}")


def _write(folder: Path, config: Any, whole: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    named = {name.replace(f".{_NAME}.", "."): value for name, value in whole.items()}
    announced = {name: TensorInfo(dtype=value.dtype, shape=tuple(value.shape)) for name, value in named.items()}

    def weights(path: Path) -> None:
        with TensorWriter(path, announced) as writer:
            for name in writer.order:
                writer.write(name, named[name])

    with hold_lock(folder / LOCK_FILE, doing="saving an adapter into it"):
        write_atomically(folder / _FILE, weights)
        trained, config.inference_mode = config.inference_mode, True
        try:
            with TemporaryDirectory() as made:
                config.save_pretrained(made)
                text = Path(made, "adapter_config.json").read_text()
        finally:
            config.inference_mode = trained
        write_atomically(folder / "adapter_config.json", lambda path: path.write_text(text))


# -- QLoRA: a frozen base in four bits -----------------------------------------------------------------------------------


def pack_linears(model: nn.Module) -> list[str]:
    """Replace each linear layer except the head by a packed one; return the full names of those that are not replaced.

    Layers with rows that are not a multiple of the block size are not replaced either.

    Raises:
        SpecError: if none can be replaced.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    left = []
    for path, module in list(model.named_modules()):
        for leaf, child in list(module.named_children()):
            if type(child) is not nn.Linear:
                continue
            if child is head or child.in_features % NF4_BLOCK:
                left.append(f"{path}.{leaf}" if path else leaf)
            else:
                module._modules[leaf] = Nf4Linear.of(child)
    if not any(isinstance(module, Nf4Linear) for module in model.modules()):
        raise SpecError(
            f"pretrained(quantize={NF4!r}) would pack nothing of {type(model).__name__}: it packs layers of type "
            f"torch.nn.Linear, the head aside, with rows of a multiple of {NF4_BLOCK} elements; leave quantize out"
        )
    return left


def unpacked_twins(model: nn.Module) -> dict[Tensor, Tensor]:
    """Map each packed weight of a model to a meta tensor of its unpacked shape."""
    return {
        module.weight: torch.empty(module.out_features, module.in_features, device="meta")
        for module in model.modules()
        if isinstance(module, Nf4Linear)
    }
