"""Conversion between Hugging Face folders and checkpoints, tensor by tensor, with only a few tensors in memory.

A checkpoint of a Hugging Face model has that model's names, as has its folder. Our own GPT and Llama have other names, and
correspond to GPT-2 and Llama there (:mod:`meshfold.huggingface.decoder_names`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.folder import STATE_FILE, new_checkpoint, resolve_folder
from meshfold.checkpoint.tensors import (
    StoredTensor,
    TensorWriter,
    has_weights,
    open_weights,
    verify_checksums,
)
from meshfold.engine.checkpoints import MODEL_FILE, Checkpoint
from meshfold.huggingface import decoder_configs, decoder_names
from meshfold.huggingface.decoder_names import Step, unchanged
from meshfold.huggingface.folder_config import checkpoint_in, read_raw_config
from meshfold.huggingface.folder_writer import SHARD_BYTES, FolderWriter
from meshfold.huggingface.packed_folder import is_packed
from meshfold.huggingface.upcycling import upcycled
from meshfold.huggingface.weight_names import model_of, to_files
from meshfold.models import DecoderConfig

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Summary of the written files.

    Attributes:
        tensors: how many.
        bytes: of all of them.
        files: how many files of weights.
        kind: ``"hf"`` or ``"checkpoint"``.
    """

    tensors: int
    bytes: int
    files: int
    kind: str


def kind_of(folder: Path) -> str:
    """``"checkpoint"`` or ``"hf"``.

    Raises:
        CheckpointError: for a folder that is neither.
    """
    if (folder / STATE_FILE).is_file():
        return "checkpoint"
    if has_weights(folder):
        return "hf"
    if not folder.exists():
        what = "there is no such folder; give a checkpoint or a Hugging Face model"
    elif not folder.is_dir():
        what = "it is a file; give the folder of a checkpoint or of a Hugging Face model"
    else:
        what = f"it has no {STATE_FILE} and no weights of a Hugging Face model"
        last = folder / "checkpoint"  # of meshfold train
        inside = last if (last / STATE_FILE).is_file() else checkpoint_in(folder)
        what += f". Did you mean {inside}?" if inside is not None else "; give a folder that has one of these"
    raise CheckpointError(f"cannot convert {folder}: {what}")


def convert_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    dtype: str | None = None,
    like: str | os.PathLike[str] | None = None,
    names: str | None = None,
    config: DecoderConfig | None = None,
    shard_bytes: int = SHARD_BYTES,
    experts: int | None = None,
    top_k: int = 2,
) -> Converted:
    """Write the model in one folder into another, as one or the other kind.

    Args:
        source: a Hugging Face folder (safetensors or ``.bin``), or a checkpoint under whatever spec.
        target: a new or empty folder.
        to: ``"hf"`` or ``"checkpoint"``.
        dtype: of floating tensors; None: unchanged.
        like: a Hugging Face folder that gives tokenizer files, and ``config.json`` where the source does not know it.
        names: of a checkpoint: ``"hf"`` as in the folder, ``"meshfold"`` for our own GPT or Llama. None: as in the source.
        config: of our own model, for a checkpoint that does not know it (written before this version).
        shard_bytes: of a file of weights of a Hugging Face folder.
        experts: write a mixture that computes the same, with this many copies of each feed-forward; into a Hugging Face folder.
        top_k: experts a token of that mixture.

    Raises:
        CheckpointError: if it cannot be read or written, or has no equivalent there.
        SpecError: for numbers of experts that do not fit.
    """
    came, place = Path(source), None if like is None else Path(like)
    if place is not None and not (place / "config.json").is_file():
        raise CheckpointError(f"{place} has no config.json: name a folder of a Hugging Face model")
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if experts is not None and to != "hf":
        raise CheckpointError(
            "a mixture is written into a Hugging Face folder (to='hf'); then convert that folder to a checkpoint"
        )
    kind = kind_of(came)
    if kind == "hf":
        given, state = open_weights(came), None
        verify_checksums(given, 0, 1)
        theirs = read_raw_config(came) if (came / "config.json").is_file() else None
        described: dict[str, Any] | None = None if theirs is None else {"kind": "hf", "config": theirs}
        if is_packed(theirs) and (to != "hf" or dtype is not None or experts is not None):
            raise CheckpointError(
                f"{came}: its weights are packed (quantization_config), and only a copy of them as they are can be written; load "
                "it with transformers, call dequantize(), save it, and convert that folder"
            )
        place = place or came
    else:
        found = Checkpoint(came)
        found.verify(weights_only=True)
        given, state = found.model, found.state
        described = state.get("model")
        if config is not None:
            described = config.checkpoint_description()
        if described is None and "blocks.0.attn.qkv.weight" in given:
            raise CheckpointError(
                f"{came} does not say which GPT or Llama it belongs to: name its preset and what was changed (--model, --set)"
            )
    own = described is not None and described["kind"] != "hf"
    if to == "hf":
        if own:
            steps, described = _to_theirs(given, described)
        elif kind == "checkpoint" and described is not None:
            steps = to_files(model_of(described["config"]), given)
        else:
            steps = unchanged(given)
        if experts is not None:
            steps, theirs = upcycled(steps, None if described is None else described["config"], experts, top_k)
            described = {"kind": "hf", "config": theirs}
        steps = cast_to(steps, dtype)
        return _write_folder(target, given, steps, described, place, shard_bytes)
    if names == "meshfold" and not own:
        steps, described = _to_ours(given, described)
    elif names == "hf" and own:
        steps, described = _to_theirs(given, described)
    else:
        steps = unchanged(given)
    return _write_checkpoint(target, given, cast_to(steps, dtype), described, state)


def _to_theirs(given: Mapping[str, Tensor], described: Mapping[str, Any] | None) -> tuple[list[Step], dict[str, Any]]:
    config = decoder_configs.own_config(described or {})
    return decoder_names.leave(given, config), {"kind": "hf", "config": decoder_configs.theirs_of(config)}


def _to_ours(given: Mapping[str, Tensor], described: Mapping[str, Any] | None) -> tuple[list[Step], dict[str, Any]]:
    if described is None:
        raise CheckpointError("Meshfold's names need the model's config.json, and there is none")
    config = decoder_configs.ours_of(described["config"])
    full = decoder_names.full_names(given, config)
    steps = [
        replace(step, sources=tuple(full[name] for name in step.sources)) for step in decoder_names.enter(given, config)
    ]
    return steps, config.checkpoint_description()


def cast_to(steps: list[Step], dtype: str | None) -> list[Step]:
    """Return floating-point results in another dtype; wide ones first, so that each begins at a multiple of its element's size."""
    if dtype is not None:
        steps = [
            replace(
                step,
                results={
                    name: replace(one, dtype=DTYPES[dtype]) if one.dtype.is_floating_point else one
                    for name, one in step.results.items()
                },
            )
            for step in steps
        ]
    return sorted(steps, key=lambda step: -next(iter(step.results.values())).dtype.itemsize)


def _write_folder(
    target: str | os.PathLike[str],
    given: Mapping[str, Tensor],
    steps: list[Step],
    described: Mapping[str, Any] | None,
    like: Path | None,
    shard_bytes: int,
) -> Converted:
    announced = {name: one for step in steps for name, one in step.results.items()}
    config = None if described is None else described["config"]
    writer = FolderWriter(target, announced, config=config, like=like, shard_bytes=shard_bytes)
    try:
        for step in steps:
            made = step.make([_value(given[name]) for name in step.sources])
            for name, value in zip(step.results, made, strict=True):
                writer.write(name, value)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    size = sum(one.bytes for one in announced.values())
    return Converted(tensors=len(announced), bytes=size, files=writer.files, kind="hf")


def _write_checkpoint(
    target: str | os.PathLike[str],
    given: Mapping[str, Tensor],
    steps: list[Step],
    described: Mapping[str, Any] | None,
    state: dict[str, Any] | None,
) -> Converted:
    """Write a checkpoint of only the model, which an engine loads with ``weights_only=True``."""
    final = resolve_folder(target)
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise CheckpointError(f"{target} already exists: remove it, or choose another folder")
    announced = {name: one for step in steps for name, one in step.results.items()}
    with (
        new_checkpoint(final, {**_state(state), "model": described}, doing="converting into it") as folder,
        TensorWriter(folder / MODEL_FILE, announced, order=[*announced]) as writer,
    ):
        for step in steps:
            made = step.make([_value(given[name]) for name in step.sources])
            for name, value in zip(step.results, made, strict=True):
                writer.write(name, value.to(announced[name].dtype))
    size = sum(one.bytes for one in announced.values())
    return Converted(tensors=len(announced), bytes=size, files=1, kind="checkpoint")


def _value(value: Tensor) -> Tensor:
    """Return a tensor that torch also accepts in a list."""
    return value.read() if isinstance(value, StoredTensor) else value


def _state(state: dict[str, Any] | None) -> dict[str, Any]:
    """Return the state of a run that has only a model: its counters if it had any, else a new run's."""
    fresh: dict[str, Any] = {
        "spec": "{}",
        "precision": None,
        "seed": 0,
        "step": 0,
        "micro_step": 0,
        "skipped_steps": 0,
        "scaler": {},
        "data": {},
    }
    return fresh if state is None else {name: state.get(name, value) for name, value in fresh.items()}
