"""Arithmetic of a pipeline's stages: their blocks and ranks, and a schedule's idle time and micro-batches in flight."""

from __future__ import annotations

from functools import lru_cache

from meshfold.mesh.spec import PipelineSpec
from meshfold.pipeline.runtime import balance_blocks
from meshfold.planner.suggestions.shape import Shape


@lru_cache(maxsize=4096)
def stage_blocks(shape: Shape, stages: int) -> tuple[int, ...]:
    """Return the blocks of each stage, balanced as the pipeline does."""
    if stages == 1 or shape.blocks < stages:
        return (shape.blocks,) if stages == 1 else (1,) * stages
    return tuple(balance_blocks([float(shape.block)] * shape.blocks, stages, before=0.0, after=float(shape.head)))


def rank_of(stage: int, ranks: int, pipeline: PipelineSpec | None) -> int:
    """Return the rank of a stage: after the last rank, V-shaped schedules turn around and others start again at the first."""
    turn, place = divmod(stage, ranks)
    shaped = pipeline is not None and pipeline.schedule in ("zb-v", "dualpipe-v", "hanayo")
    return ranks - 1 - place if shaped and turn % 2 else place


def idle_share(pipeline: PipelineSpec) -> float:
    """Return the idle time of equal stages, in micro-batches of one rank's work."""
    shares = {"gpipe": 1.0, "1f1b": 1.0, "zb-h1": 1 / 3, "zb-h2": 0.0, "zb-v": 0.05, "dualpipe-v": 0.1, "hanayo": 0.5}
    share = shares.get(str(pipeline.schedule), 1.0 / (pipeline.chunks or 1))
    return share * (pipeline.size - 1)


def live_microbatches(pipeline: PipelineSpec | None, microbatches: int) -> float:
    """Return the most micro-batches whose activations a rank holds, over all its stages."""
    assert pipeline is not None
    size = pipeline.size
    most = {"gpipe": microbatches, "zb-h2": 2 * size - 1, "dualpipe-v": size + 0.5}
    if pipeline.schedule == "interleaved":
        chunks = pipeline.chunks or 2
        return min(microbatches, size * (1 + (size - 1) / (size * chunks)))
    return float(min(microbatches, most.get(str(pipeline.schedule), size)))
