"""Weights, gradients and optimizer state of a model whose data ranks each keep all of them."""

from __future__ import annotations

from meshfold.engine.states.optimizer_state import plain_settings
from meshfold.engine.states.replicated import PlainStates, Source, States, source_like
from meshfold.engine.states.shown_gradients import ShownGradients

__all__ = ["PlainStates", "ShownGradients", "Source", "States", "plain_settings", "source_like"]
