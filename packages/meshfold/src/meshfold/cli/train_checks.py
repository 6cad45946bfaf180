"""Checks of a run before it starts: its devices, its folder, and the checkpoint that it resumes from."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from meshfold.cli.arguments import Failure

if TYPE_CHECKING:
    from meshfold.train.progress import Progress
    from meshfold.train.settings import TrainSettings


def check_device(settings: TrainSettings, ranks: int) -> None:
    """Check that there is a GPU for each rank, if GPUs are used."""
    if settings.device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
        if gpus < ranks:
            raise Failure(
                f"--device cuda needs a GPU for each of {ranks} ranks, and torch sees {gpus}: use --device cpu"
            )


def check_warmup(settings: TrainSettings) -> None:
    """Check that the warmup ends within the run."""
    if settings.warmup > settings.steps:
        raise Failure(
            f"--warmup {settings.warmup} with --steps {settings.steps}: the learning rate would never reach "
            f"--lr {settings.lr:g}; write a --warmup of {settings.steps} at most"
        )


def check_fp8(settings: TrainSettings) -> None:
    """Check that linear layers in fp8 are those of a model in bf16."""
    if settings.fp8 is not None and settings.precision != "bf16":
        raise Failure(
            f"--fp8 {settings.fp8} with --precision {settings.precision}: layers in fp8 belong to a model in bf16; write "
            f"--fp8 {settings.fp8} --precision bf16"
        )


def check_unused(settings: TrainSettings) -> None:
    """Check that a new run's folder can be written to and holds no run, nor the text to train on. This takes no time.

    Raises:
        Failure: if not.
        InUseError: if another run is writing there.
    """
    from meshfold.train.run_folder import check_free

    check_out(settings.out)
    check_free(settings.out)
    if os.path.isdir(settings.data) and os.path.realpath(settings.data) == os.path.realpath(settings.out):
        raise Failure(
            f"--out {settings.out!r} is the folder of --data: files of the run would lie among those to train on; write "
            f"--out {_free(settings.out)}"
        )
    there = settings.checkpoints.there()
    if there and not settings.resume:
        raise Failure(
            f"{there[0]} already exists: resume it with --resume, or start a new run with --out {_free(settings.out)}"
        )


def _free(out: str) -> str:
    """Return the name of a folder beside this one that does not exist."""
    return next(name for name in (f"{out.rstrip(os.sep)}{n}" for n in count(2)) if not os.path.exists(name))


def check_folder(settings: TrainSettings, progress: Progress) -> None:
    """Check that the folder is writable and unused, and has a checkpoint exactly if the run resumes from one.

    Raises:
        Failure: if not.
        InUseError: if another run is writing there.
    """
    from meshfold.engine.checkpoints import Checkpoint
    from meshfold.engine.optimizers import OPTIMIZERS
    from meshfold.train.run_folder import describe_changes, read_settings

    check_unused(settings)
    if settings.resume:
        path = must_go_on(settings.out)
        found = Checkpoint(path)
        for damaged in settings.checkpoints.damaged():
            progress.say(f"warning: {damaged} is not complete, and is passed over")
        by_class = {cls.__name__: name for name, cls in OPTIMIZERS.items()}
        trained_with = by_class.get(str(found.state.get("optimizer", {}).get("class")), settings.optimizer)
        if trained_with != settings.optimizer:
            raise Failure(
                f"--optimizer {settings.optimizer}: {path} holds the state of {trained_with}; type "
                f"--optimizer {trained_with}, or start over in another --out"
            )
        for sentence in describe_changes(settings, read_settings(settings.out)):
            progress.say(sentence)


def must_go_on(out: str) -> Path:
    """Return the checkpoint that a run resumes from.

    Raises:
        Failure: if there is none.
        CheckpointError: if there are some, and none is complete.
    """
    from meshfold.train.run_folder import KeptCheckpoints

    path = KeptCheckpoints(out, keep=1).to_go_on_from()
    if path is None:
        raise Failure(
            f"--resume: there is no checkpoint in {out!r} to resume from; leave --resume out to start a new run"
        )
    return path


def check_out(out: str) -> None:
    """Check that the folder is writable, or can be made.

    Raises:
        Failure: if not.
    """
    path = Path(out).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir():
        what = "is a file" if there == path else f"cannot be made: {there} is a file"
        raise Failure(f"--out {out!r} {what}; give a folder to write to")
    if not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written to" if there == path else f"cannot be made: {there} cannot be written to"
        raise Failure(f"--out {out!r} {what}; give another folder")


def check_checkpoint(settings: TrainSettings, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check that the checkpoint to resume from is of this model.

    Raises:
        Failure: if it is not.
    """
    from meshfold.engine.checkpoints import Checkpoint

    path = must_go_on(settings.out)
    kept = {name: tuple(tensor.shape) for name, tensor in Checkpoint(path).model.items()}
    for name in sorted(kept.keys() | shapes.keys()):
        here, there = shapes.get(name, "nothing of that name"), kept.get(name, "nothing of that name")
        if here != there:
            raise Failure(
                f"{path} belongs to another model: {name!r} is {there} there and {here} here; leave "
                "--model, --set and --tokenizer out, which takes those of the run, or start a new run in another --out"
            )
