"""Ranks of a spec: mesh, groups of data ranks, and errors that all of them raise."""

from __future__ import annotations

from meshfold.engine.world.distributed_errors import fail_together
from meshfold.engine.world.world import PIPE, World, join_world, require_runnable

__all__ = ["PIPE", "World", "fail_together", "join_world", "require_runnable"]
