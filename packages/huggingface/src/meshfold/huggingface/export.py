"""A Hugging Face folder of an engine's model, whatever the spec: gathered tensor by tensor, written by rank 0."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.folder import with_advice
from meshfold.checkpoint.tensors import has_weights, open_weights
from meshfold.engine.checkpoints import describe_model
from meshfold.engine.world import fail_together
from meshfold.huggingface import decoder_configs, decoder_names
from meshfold.huggingface.conversion import DTYPES, cast_to
from meshfold.huggingface.decoder_names import Step
from meshfold.huggingface.folder_writer import FolderWriter
from meshfold.huggingface.weight_names import to_files

if TYPE_CHECKING:
    from meshfold.engine import Engine


def save_hugging_face(
    engine: Engine,
    folder: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None,
    dtype: str | None,
    shard_bytes: int,
) -> None:
    """See :meth:`Engine.save_hugging_face`."""
    world, sources = engine.world, engine.model_state.sources()
    what, writer = f"cannot write {folder}", None
    error: Exception | None = None
    steps: list[Step] = []
    try:
        steps, config = _steps(engine, Path(like) if like is not None else None, dtype)
        if world.mesh.rank == 0:
            announced = {name: one for step in steps for name, one in step.results.items()}
            place = None if like is None else Path(like)
            writer = FolderWriter(folder, announced, config=config, like=place, shard_bytes=shard_bytes)
    except Exception as wrong:
        error = wrong
    fail_together(world, with_advice(error), what)
    for step in steps:
        if not engine.states.all_read and 0 not in world.members:
            break
        try:
            read = [sources[name].read() for name in step.sources]  # collective: take part even after an error
        except Exception as unread:
            error = error or unread
            continue
        if writer is not None and error is None:
            error = _written(writer, step, read)
    if writer is not None:
        try:
            if error is None:
                writer.close()
        except Exception as wrong:
            error = wrong
        if error is not None:
            writer.abandon()
    fail_together(world, with_advice(error), what)


def _written(writer: FolderWriter, step: Step, read: list[Tensor]) -> Exception | None:
    try:
        made = step.make([value.to("cpu") for value in read])
        for name, value in zip(step.results, made, strict=True):
            writer.write(name, value)
    except Exception as error:
        return error
    return None


def _steps(engine: Engine, like: Path | None, dtype: str | None) -> tuple[list[Step], dict[str, Any] | None]:
    """Return the steps that make the folder's tensors, and the configuration if the model says it."""
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype!r}: write one of {', '.join(DTYPES)}")
    given: dict[str, Tensor] = {
        name: torch.empty(source.shape, dtype=source.dtype, device="meta")
        for name, source in engine.model_state.sources().items()
    }
    described = describe_model(engine.model)
    if described is not None and described["kind"] != "hf":
        config = decoder_configs.own_config(described)
        steps = decoder_names.leave(given, config)
        theirs: dict[str, Any] | None = decoder_configs.theirs_of(config)
    else:
        steps = to_files(engine.model, given)
        theirs = None if described is None else described["config"]
    if dtype is None and like is not None and has_weights(like):
        kinds = {name: value.dtype for name, value in open_weights(like).items()}
        steps = [
            replace(
                step,
                results={name: replace(one, dtype=kinds.get(name, one.dtype)) for name, one in step.results.items()},
            )
            for step in steps
        ]
    return cast_to(steps, dtype), theirs
