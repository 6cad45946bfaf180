"""Weights, gradients and optimizer state of a model whose data ranks each keep all of them."""

from __future__ import annotations

from meshfold.engine.states.accumulation import Accumulation
from meshfold.engine.states.data_parallel import BUCKET_BYTES, GradientReducer
from meshfold.engine.states.optimizer_state import plain_settings
from meshfold.engine.states.protocols import Source, States
from meshfold.engine.states.replicated import PlainStates, source_like

__all__ = [
    "BUCKET_BYTES",
    "Accumulation",
    "GradientReducer",
    "PlainStates",
    "Source",
    "States",
    "plain_settings",
    "source_like",
]
