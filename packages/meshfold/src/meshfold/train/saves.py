"""Checkpoints of a run: the one it resumes from, those it writes, and removal of older ones."""

from __future__ import annotations

from typing import Any

from meshfold.checkpoint import CheckpointError
from meshfold.engine import Engine
from meshfold.train.progress import Progress
from meshfold.train.schedule import go_on
from meshfold.train.settings import TrainSettings


class Saves:
    """Loader and writer of a run's checkpoints; every rank has one.

    An older checkpoint is removed only when a newer one is complete.

    Attributes:
        path: of the newest checkpoint.
        step: the step that it was saved after.
    """

    def __init__(self, engine: Engine, settings: TrainSettings, progress: Progress) -> None:
        """Args:
        engine: that is trained.
        settings: say where checkpoints are.
        progress: prints notes.
        """
        self._engine, self._settings, self._progress = engine, settings, progress
        self._kept, self._writes = settings.checkpoints, engine.mesh.rank == 0
        self.path, self.step = self._kept.place(0), 0
        self._under_way: Any = None  # a save in the background
        # The earlier run may have been killed before it could prune.
        self._to_prune = settings.resume and self._writes

    def resume(self) -> int:
        """Load the newest complete checkpoint, if the run resumes; return the step that it was saved after, else 0."""
        if self._settings.resume:
            self.path = self._kept.to_go_on_from() or self.path
            self._load()
            self.step = self._engine.steps + self._engine.skipped_steps
            self._progress.say(f"resuming from step {self.step} of {self.path}")
        return self.step

    def _load(self) -> None:
        """Load the checkpoint, but take learning rate and weight decay from the settings."""
        engine = self._engine
        assert engine.optimizer is not None and engine.lr_scheduler is not None  # train gives both
        decay = [group["weight_decay"] for group in engine.optimizer.param_groups]
        engine.load(self.path)
        for group, wanted in zip(engine.optimizer.param_groups, decay, strict=True):
            group["weight_decay"] = wanted
        go_on(engine.lr_scheduler, step=engine.steps, lr=self._settings.lr)

    def save(self, step: int) -> None:
        """Save a checkpoint after a step, in the background if the settings say so."""
        self.path, self.step = self._kept.place(step), step
        if self._writes and (aside := self._kept.make_room(step)) is not None:
            self._progress.say(f"warning: {self.path} is damaged, and is now {aside}")
        self._under_way = self._engine.save(self.path, asynchronous=self._settings.save_asynchronously)
        self._to_prune = self._writes

    def prune(self) -> None:
        """Remove older checkpoints, if the newest is complete; failing to remove one does not stop the run."""
        if self._to_prune and (self._under_way is None or self._under_way.done):
            self._to_prune = False
            try:
                self._kept.prune()
            except CheckpointError as error:
                self._progress.say(f"warning: {error}")

    def finish(self) -> None:
        """Wait for a save in the background, and remove older checkpoints."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
        self.prune()
