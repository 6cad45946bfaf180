"""Planning where the state of one rank's stages lives, from a trace of them without values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from meshfold.engine.model import RecomputedBlocks
from meshfold.engine.precision import Precision, other_dtypes
from meshfold.engine.world import World
from meshfold.engine.zero import PROCESS_BYTES, InFlight, regime_of, workload_of_stages
from meshfold.mesh import Entry, record
from meshfold.mesh.model_io import DryRun
from meshfold.mesh.spec import ZeroSpec
from meshfold.planner.estimates import Memory
from meshfold.planner.machines import Machine
from meshfold.planner.zero_estimate import (
    chunk_entries,
    fit,
    trace_without_values,
    with_collectives,
)
from meshfold.zero_gemini import slot_alignment
from meshfold.zero_gemini.planner import Machine as Rates
from meshfold.zero_gemini.planner import Plan, Regime
from meshfold.zero_gemini.profiler import ChunkUse, Trace, chunk_uses


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A rank's plan, or why there is none; what it holds, and the collectives on its chunks in an optimizer step."""

    plan: Plan | None
    refusal: str
    memory: Memory
    entries: list[Entry]


@dataclass(frozen=True, kw_only=True)
class StageProblem:
    """A rank's stages, seen without values; what is still to be known is how many micro-batches they hold at once."""

    trace: Trace
    chunks: Sequence[ChunkUse]
    spec: ZeroSpec
    world: World
    regime: Regime
    rates: Rates
    tokens: int
    accumulation: int
    ranks_per_host: int
    name: str
    recomputed: bool = False

    def solved(self, live: int, stages: int, microbatches: int) -> Solved:
        """The plan.

        Args:
            live: pairs of stage and micro-batch that the rank holds at most.
            stages: of the rank.
            microbatches: of a micro-step.
        """
        workload = workload_of_stages(
            self.trace, self.chunks, InFlight(live=live, stages=stages, microbatches=microbatches),
            accumulation=self.accumulation, name=self.name, regime=self.regime, tokens=self.tokens, stage=self.spec.stage,
            data_ranks=self.world.data_size, ranks_per_host=self.ranks_per_host, host_base_bytes=PROCESS_BYTES,
            reshards=self.spec.reshard_after_forward,
        )  # fmt: skip
        workload = replace(workload, recomputed=self.recomputed)
        found, refusal, memory = fit(self.spec, workload, self.rates)
        return Solved(
            plan=found,
            refusal=refusal,
            memory=memory,
            entries=chunk_entries(workload, self.world.outer_axes, self.world.mesh),
        )


def stage_problem(
    model: nn.Module,
    world: World,
    spec: ZeroSpec,
    precision: Precision,
    rehearse: Callable[[], None],
    stand_in: DryRun,
    *,
    machine: Machine,
    tokens: int,
    accumulation: int,
    moments: int,
    blocks: RecomputedBlocks | None,
    name: str,
) -> StageProblem:
    """Trace a rank's stages on one micro-batch.

    Args:
        model: what the rank has of it, on the meta device.
        world: where it lies.
        spec: the entry ``zero``.
        precision: of the model.
        rehearse: F and backward of the stages.
        stand_in: under which it runs.
        machine: what to plan for.
        tokens: of this rank in an optimizer step.
        accumulation: micro-steps of an optimizer step.
        moments: numbers that the optimizer keeps for an element.
        blocks: those whose activations the plan may keep.
        name: of the model.
    """
    local = min(machine.devices, world.mesh.world_size)
    with record() as log:
        trace, _ = trace_without_values(model, rehearse, stand_in, machine, precision, blocks)
    chunks = chunk_uses(
        model,
        world.mesh,
        dtype=precision.dtype,
        other_dtypes=other_dtypes(model, precision),
        slot_align_elems=slot_alignment(spec.regime),
    )
    return StageProblem(
        trace=with_collectives(trace, log, world.mesh, machine),
        chunks=chunks,
        spec=spec,
        world=world,
        regime=regime_of(
            spec, precision, accumulation=max(2, accumulation), ranks=world.data_size, moments=moments
        ),
        rates=machine.rates(precision.name, mesh=world.mesh, axes=world.outer_axes, ranks=local),
        tokens=tokens,
        accumulation=accumulation,
        ranks_per_host=local,
        name=name,
    )
