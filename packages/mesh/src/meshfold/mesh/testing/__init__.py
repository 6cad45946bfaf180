"""Tests on several ranks: warm pools of gloo processes, and a fake world for recorded tests."""

from meshfold.mesh.testing.pool import RankFailure
from meshfold.mesh.testing.run import close_pools, copy_for_ranks, fake_world, ranks, run_on_ranks

__all__ = ["RankFailure", "close_pools", "copy_for_ranks", "fake_world", "ranks", "run_on_ranks"]
