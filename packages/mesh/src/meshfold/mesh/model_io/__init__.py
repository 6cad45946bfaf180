"""Inputs and outputs of a model: labels, packed documents, outputs that ranks share, runs on the meta device."""

from __future__ import annotations

from meshfold.mesh.model_io.documents import check_positions, first_tokens, without_first_tokens
from meshfold.mesh.model_io.dry_run import WithoutValues, saved_for_backward
from meshfold.mesh.model_io.eval_mode import evaluating
from meshfold.mesh.model_io.labels import (
    IGNORE,
    has_encoder_apart,
    labels_are_shifted,
    name_of_targets,
    with_one_at_least,
)
from meshfold.mesh.model_io.lazy_tensor import Pieces, here, when_read
from meshfold.mesh.model_io.outputs import changed

__all__ = [
    "IGNORE",
    "Pieces",
    "WithoutValues",
    "changed",
    "check_positions",
    "evaluating",
    "first_tokens",
    "has_encoder_apart",
    "here",
    "labels_are_shifted",
    "name_of_targets",
    "saved_for_backward",
    "when_read",
    "with_one_at_least",
    "without_first_tokens",
]
