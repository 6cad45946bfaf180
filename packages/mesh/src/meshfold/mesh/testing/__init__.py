"""Tests on several ranks: warm pools of gloo processes, a fake world for recorded tests, bytes of tensors, operators."""

from meshfold.mesh.testing.operators import Operators
from meshfold.mesh.testing.pool import RankFailure
from meshfold.mesh.testing.run import close_pools, copy_for_ranks, fake_world, ranks, run_on_ranks
from meshfold.mesh.testing.tensor_memory import TensorMemory, tensor_memory

__all__ = [
    "Operators",
    "RankFailure",
    "TensorMemory",
    "close_pools",
    "copy_for_ranks",
    "fake_world",
    "ranks",
    "run_on_ranks",
    "tensor_memory",
]
