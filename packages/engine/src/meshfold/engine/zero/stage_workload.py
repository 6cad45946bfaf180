"""An optimizer step of one rank of a pipeline, as Gemini's planner sees a step.

The rank makes forward and backward of each micro-batch like an accumulation of as many micro-steps; what it holds besides
is the activations of the other micro-batches that are under way, and gradients of whole chunks, which are summed over
the data axes once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshfold.zero_gemini.planner import Regime, Workload
from meshfold.zero_gemini.profiler import ChunkUse, Trace, workload_of


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Micro-batches that a schedule lets a rank hold.

    Attributes:
        live: pairs of stage and micro-batch, at most.
        stages: of the rank.
        microbatches: of a micro-step.
    """

    live: int
    stages: int
    microbatches: int


def workload_of_stages(
    trace: Trace,
    chunks: Sequence[ChunkUse],
    flying: InFlight,
    *,
    accumulation: int,
    name: str,
    regime: Regime,
    tokens: int,
    stage: int,
    data_ranks: int,
    ranks_per_host: int,
    host_base_bytes: int,
    reshards: bool = True,
) -> Workload:
    """Return the workload of one rank's optimizer step.

    Args:
        trace: of F of its stages on one micro-batch, in order, and of their backwards.
        chunks: of the rank.
        flying: what the schedule lets it hold.
        accumulation: micro-steps of an optimizer step.
        name, regime, tokens, stage, data_ranks, ranks_per_host, host_base_bytes, reshards: as
            :func:`meshfold.zero_gemini.profiler.workload_of` takes them.
    """
    made = workload_of(
        trace, chunks, name=name, regime=regime, tokens=tokens, stage=stage,
        accumulation=accumulation * flying.microbatches, data_ranks=data_ranks, ranks_per_host=ranks_per_host,
        host_base_bytes=host_base_bytes, reshards=reshards, whole_gradients=data_ranks > 1,
    )  # fmt: skip
    at_once = -(-flying.live // flying.stages)  # micro-batches; the trace has counted one of them
    last, end = trace.moments[trace.forward_moments - 1], trace.moments[-1]
    others = (at_once - 1) * max(0, last.left_bytes - end.left_bytes)
    return replace(
        made,
        non_model_bytes=tuple(value + others for value in made.non_model_bytes),
        layers=tuple(replace(layer, kept_bytes=layer.kept_bytes * at_once) for layer in made.layers),
    )
