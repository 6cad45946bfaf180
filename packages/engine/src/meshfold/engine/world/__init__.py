"""Ranks of a spec: mesh, groups of data ranks, and errors that all of them raise."""

from __future__ import annotations

from meshfold.engine.world.world import PIPE, World, crossing, fail_together, join_world, require_runnable

__all__ = ["PIPE", "World", "crossing", "fail_together", "join_world", "require_runnable"]
