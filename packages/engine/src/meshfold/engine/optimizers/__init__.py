"""Optimizers by name, those that cannot step on shards, and the guard of their steps."""

from __future__ import annotations

from meshfold.engine.optimizers.optimizers import OPTIMIZERS, Factory, check_optimizer_class
from meshfold.engine.optimizers.step_guard import StepGuard

__all__ = ["OPTIMIZERS", "Factory", "StepGuard", "check_optimizer_class"]
