"""Folders of checkpoints: written aside, put in place at once, listed, locked and removed."""

from __future__ import annotations

from meshfold.checkpoint.folder.steps import latest, prune, step_folder

__all__ = ["latest", "prune", "step_folder"]
