"""Failures of commands, and the sentence that is printed for them."""

from __future__ import annotations

import sys


class Failure(Exception):
    """A sentence for the person who typed the command, and the code to exit with."""

    def __init__(self, sentence: str, code: int = 2) -> None:
        super().__init__(sentence)
        self.code = code


def sentence_of(error: Exception) -> Failure | None:
    """An error that was raised on purpose, or by the system, as a sentence; None for one that is a bug."""
    if isinstance(error, Failure):
        return error
    errors = sys.modules.get("meshfold.mesh.errors")  # not imported for this alone: it brings torch
    if errors is not None and isinstance(error, errors.MeshfoldError):
        return Failure(str(error), 1)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return Failure(f"{error.filename}: {error.strerror}", 1)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        advice = (
            "use a smaller --batch-size or --seq-len, --accumulate more, or split the model over more ranks"
        )
        return Failure(f"the GPU's memory is full: {advice}", 1)
    return None
