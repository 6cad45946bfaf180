"""Optimizers by name, those that cannot step on shards, and the guard of their steps."""

from __future__ import annotations

from meshfold.engine.optimizers.optimizers import OPTIMIZERS, Factory, StepGuard, check_optimizer_class

__all__ = ["OPTIMIZERS", "Factory", "StepGuard", "check_optimizer_class"]
