"""Parameters of a sharded model: their metadata, names and hooks, their gradients, what an optimizer keeps of them."""

from __future__ import annotations

from meshfold.mesh.parameters.deferred_wgrad import (
    Defers,
    Pair,
    Queue,
    Site,
    add_gradient,
    add_product,
    gradients_together,
    put,
    when_made,
)
from meshfold.mesh.parameters.grad_norm import (
    clip_gradient_values,
    clip_gradients,
    gradient_norm,
    largest_of,
    pieces,
)
from meshfold.mesh.parameters.hooks import keep_parameter_hooks
from meshfold.mesh.parameters.names import plain
from meshfold.mesh.parameters.optimizer_probe import TrialError, sight_of
from meshfold.mesh.parameters.parameter_meta import ParameterMeta, annotate, metadata, placed, trainable
from meshfold.mesh.parameters.shown_gradient import ShownGradient
from meshfold.mesh.parameters.stored_value import Parts

__all__ = [
    "Defers",
    "Pair",
    "ParameterMeta",
    "Parts",
    "Queue",
    "ShownGradient",
    "Site",
    "TrialError",
    "add_gradient",
    "add_product",
    "annotate",
    "clip_gradient_values",
    "clip_gradients",
    "gradient_norm",
    "gradients_together",
    "keep_parameter_hooks",
    "largest_of",
    "metadata",
    "pieces",
    "placed",
    "plain",
    "put",
    "sight_of",
    "trainable",
    "when_made",
]
