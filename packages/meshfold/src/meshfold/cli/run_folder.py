"""The folder of a run, looked at before anything starts: one may write there, nobody else does, and it has a checkpoint or none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from meshfold.cli.failure import Failure

if TYPE_CHECKING:
    from meshfold.train.progress import Progress
    from meshfold.train.settings import TrainSettings


def check_folder(settings: TrainSettings, progress: Progress) -> None:
    """Check that the folder can be written to, is in nobody's use, and has a checkpoint exactly if the run goes on from one.

    Raises:
        Failure: if it is not so.
        InUseError: if another run is writing there.
    """
    from meshfold.engine.checkpoints import Checkpoint
    from meshfold.engine.optimizers import OPTIMIZERS
    from meshfold.train.folder_in_use import check_free
    from meshfold.train.kept_settings import kept, what_is_new

    check_out(settings.out)
    check_free(settings.out)
    there = settings.checkpoints.there()
    if settings.resume:
        path = must_go_on(settings.out)
        found = Checkpoint(path)
        for damaged in settings.checkpoints.damaged():
            progress.say(f"warning: {damaged} is not complete, and is passed over")
        trained_with = str(found.state.get("optimizer", {}).get("class")).lower()
        if trained_with in OPTIMIZERS and trained_with != settings.optimizer:
            raise Failure(
                f"--optimizer {settings.optimizer}: {path} holds the state of {trained_with}; type "
                f"--optimizer {trained_with}, or start anew in another --out"
            )
        for sentence in what_is_new(settings, kept(settings.out)):
            progress.say(sentence)
    elif there:
        raise Failure(f"{there[0]} is there already: go on from it with --resume, or choose another --out")


def must_go_on(out: str) -> Path:
    """Return the checkpoint that a run goes on from.

    Raises:
        Failure: if there is none.
        CheckpointError: if there are some, and none is complete.
    """
    from meshfold.train.kept_checkpoints import KeptCheckpoints

    path = KeptCheckpoints(out, keep=1).to_go_on_from()
    if path is None:
        raise Failure(
            f"--resume: there is no checkpoint in {out!r} to go on from; leave --resume out to start anew"
        )
    return path


def check_out(out: str) -> None:
    """Check that the folder is one that can be written to, or could be made.

    Raises:
        Failure: if it is none.
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
    """Check that the checkpoint to go on from is of this model.

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
                f"{path} is of another model: {name!r} is {there} there and {here} here; give the "
                "--model, --set and --tokenizer that it was trained with"
            )
