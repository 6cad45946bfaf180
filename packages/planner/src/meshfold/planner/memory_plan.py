"""The bytes that a spec makes a rank hold, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from meshfold.mesh import ParallelSpec
from meshfold.planner.estimate import Memory
from meshfold.planner.planner import estimate


def plan_memory(
    build: Callable[[], nn.Module],
    parallel: Mapping[str, object] | ParallelSpec,
    *,
    batch_size: int,
    seq_len: int,
    world_size: int | None = None,
    **settings: Any,
) -> Memory:
    """What a rank holds in training, without running anything; of a pipeline, the rank that holds most.

    Args:
        build: makes the model, a causal language model, in the plain way; it is never allocated.
        parallel: the spec.
        batch_size: sequences of a global batch.
        seq_len: tokens of a sequence.
        world_size: ranks; by default as many as the spec names.
        settings: ``precision``, ``optimizer``, ``accumulate`` and what else
            :func:`meshfold.planner.planner.estimate` takes.

    Raises:
        SpecError: for all that the engine refuses.
    """
    spec = parallel if isinstance(parallel, ParallelSpec) else ParallelSpec.parse(parallel, world_size)
    spec = spec.with_world_size(world_size or spec.world_size)
    return estimate(build, spec, batch_size=batch_size, seq_len=seq_len, **settings).memory
