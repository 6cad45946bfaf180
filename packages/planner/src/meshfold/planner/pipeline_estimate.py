"""Estimates of a spec with ``pipeline``: every rank's stages on one micro-batch, and the simulated schedule.

Each rank of the pipeline is set up in turn, on meta tensors with simulated ranks, and runs F, B and W of its stages once. The
simulator orders them and returns the time of a step and what each rank keeps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshfold.engine.assembly import Assembled, assemble
from meshfold.engine.batches import Shares, prepare_batch, shard_batch
from meshfold.engine.model import (
    PipelinedModel,
    PipelineSettings,
    RecomputedBlocks,
    check_kernels,
    fp8_cast_bytes,
    fp8_gathered,
    recompute_blocks,
    use_fp8,
)
from meshfold.engine.optimizers import pass_roles_on
from meshfold.engine.precision import Masters, Precision, other_dtypes
from meshfold.engine.sequence import counted_attention, split_sequence
from meshfold.engine.states import GradientReducer, PlainStates
from meshfold.engine.world import PIPE, World, join_world
from meshfold.kernels import Fp8Weight
from meshfold.kernels.fuse import fuse
from meshfold.mesh import Entry, Mesh, SpecError, all_reduce, dropout_stream, record
from meshfold.mesh.collectives.push import channel_bytes
from meshfold.mesh.model_io import DryRun, loss_mean
from meshfold.mesh.processes import start_fake
from meshfold.mesh.spec import ZeroSpec
from meshfold.pipeline import Costs, Simulation, simulate_costs
from meshfold.pipeline.runtime import Microbatch
from meshfold.planner.clock import Work
from meshfold.planner.estimate_settings import EstimateSettings
from meshfold.planner.estimates import Estimate, Memory, summarize_traffic
from meshfold.planner.node_groups import some_neighbours_apart
from meshfold.planner.stage_costs import StageCosts, peak_beside_state, stage_costs
from meshfold.planner.step_bytes import fixed_bytes

if TYPE_CHECKING:
    from meshfold.pipeline import Pipeline
    from meshfold.planner.zero_estimate import StageProblem
    from meshfold.zero_gemini.planner import Plan


@dataclass(frozen=True, kw_only=True)
class PipelineEstimate:
    """A schedule and the costs of its stages.

    Attributes:
        stages: costs of each for one micro-batch, in order.
        simulation: of a micro-step; its times are seconds, its activations bytes.
        memory: of each rank of the pipeline.
        plans: under ``zero``, the placement on each rank; None if it does not fit.
        schedule_seconds: of an optimizer step's schedules.
        chunk_seconds: under ``zero``, of moving and stepping chunks on the slowest rank; else 0.
        flop: of a rank's matmuls and attention in an optimizer step, the mean of the pipeline's ranks, without recomputation.
    """

    stages: tuple[StageCosts, ...]
    simulation: Simulation
    memory: tuple[Memory, ...]
    plans: tuple[Plan | None, ...]
    schedule_seconds: float
    chunk_seconds: float
    flop: float

    @property
    def seconds(self) -> float:
        """Least seconds of an optimizer step."""
        return max(self.schedule_seconds, self.chunk_seconds)

    @property
    def fullest(self) -> int:
        """Pipeline coordinate of the rank that holds most."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)


_Ran = tuple[list[StageCosts], list[Entry], list[Microbatch]]
"""Costs of a rank's stages, the other collectives of a micro-step, and its micro-batches."""


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Measurements of one rank: its stages, and its other collectives per micro-step and per optimizer step."""

    pipeline: Pipeline
    stages: list[StageCosts]
    micro_step: list[Entry]
    step: list[Entry]
    memory: Memory
    local_parameters: int
    updated: int
    microbatches: int
    outer_axes: tuple[str, ...]
    problem: StageProblem | None


def estimate_pipeline(settings: EstimateSettings, whole: Estimate) -> Estimate:
    """Estimate a spec with ``pipeline``; see :func:`meshfold.planner.estimate`.

    Args:
        settings: of the estimate.
        whole: the estimate of the same model without ``pipeline`` and ``zero``: names, shapes, roles of submodules.

    Returns:
        ``memory``, ``traffic``, ``flops``, ``plan`` and ``local_parameters`` are those of the rank that holds most.
    """
    begin = time.perf_counter()
    spec, accumulate = settings.spec, settings.accumulate
    mesh = Mesh(spec.axes, rank=0)
    measured = [_measured_rank(settings, rank) for rank in mesh.ranks_along(PIPE)]
    stages = tuple(sorted((stage for one in measured for stage in one.stages), key=lambda stage: stage.number))
    simulation = _simulated(measured[0], stages, settings, mesh)
    memory: list[Memory] = []
    plans: list[Plan | None] = []
    refusals: list[str] = []
    entries: list[list[Entry]] = []
    for rank, one in enumerate(measured):
        own = [*_stage_entries(one, mesh), *one.micro_step] * accumulate + one.step
        if one.problem is None:
            there, others = peak_beside_state(simulation.schedule.ranks[rank], stages, one.memory.gradients)
            # A message on its way to the next rank, and one that is expected.
            others += max(sum(stage.sent) + sum(stage.received) for stage in one.stages)
            memory.append(replace(one.memory, gradients=there, activations=one.memory.activations + others))
        else:
            solved = one.problem.solved(simulation.peak_microbatches[rank], len(one.stages), one.microbatches)
            memory.append(solved.memory)
            plans.append(solved.plan)
            refusals += [f"rank {rank} of the pipeline: {solved.refusal}"] * bool(solved.refusal)
            own += solved.entries
        entries.append(own)
    found = PipelineEstimate(
        stages=stages,
        simulation=simulation,
        memory=tuple(memory),
        plans=tuple(plans),
        schedule_seconds=simulation.makespan * accumulate,
        chunk_seconds=max((plan.seconds for plan in plans if plan is not None), default=0.0),
        flop=sum(work.flop - work.repeated_flop for stage in stages for work in stage.work)
        * (accumulate * measured[0].microbatches)
        / len(measured),
    )
    rank = found.fullest
    return replace(
        whole,
        spec=spec,
        world_size=spec.world_size,
        local_parameters=measured[rank].local_parameters,
        tokens=settings.tokens,
        memory=memory[rank],
        traffic=tuple(summarize_traffic(entries[rank], measured[rank].outer_axes)),
        work=sum((work for stage in measured[rank].stages for work in stage.work), Work())
        * (accumulate * measured[rank].microbatches),
        update_bytes=0 if spec.zero is not None else measured[rank].memory.update_bytes(clip=settings.clip),
        updated=measured[rank].updated,
        seconds=whole.seconds + time.perf_counter() - begin,
        plan=plans[rank] if plans else None,
        refusal=refusals[0] if refusals else "",
        pipeline=found,
    )


def _measured_rank(settings: EstimateSettings, rank: int) -> _Rank:
    """Set up a simulated rank, run its stages once, and return the measurements."""
    with (
        start_fake(settings.spec.world_size, rank),
        DryRun() as stand_in,
        counted_attention(settings.spec, stand_in.add_attention),
    ):
        world = join_world(replace(settings.spec, zero=None), "meta")
        built = assemble(settings.build, world, settings.parameter_precision, 0, settings.rules, PipelineSettings())
        stages = built.pipelined
        if stages is None:
            raise SpecError(f"{settings.spec.written or settings.spec}: no pipeline to estimate")
        sequence = split_sequence(built.model, world, own_loss=False)
        kernels = check_kernels(settings.kernels)
        fused = None if kernels is None else fuse(built.model, **kernels)
        if fused is not None and fused.logits is not None:
            stages.pipeline.defer_logits(fused.logits)
        blocks = recompute_blocks(settings.recompute, built.model, sequence, stages)
        built.model.train()
        stages.pipeline.partition.set_absent_dtype(settings.parameter_precision.dtype)
        step: list[Entry] = []
        memory = Memory(parameters=0, masters=0, gradients=0, optimizer=0, activations=0)  # filled in by the plan
        problem: StageProblem | None = None
        if settings.spec.zero is None:
            ran, step, memory = _with_plain_states(settings, world, built, stages, stand_in)
        else:
            kept = blocks if settings.recompute == "auto" else None
            ran, problem = _with_chunks(settings, settings.spec.zero, world, built, stages, stand_in, kept)
        costs, micro_step, works = ran
        if settings.fp8_settings is not None:
            layers = use_fp8(built.model, settings.fp8_settings, world)
            cast = fp8_cast_bytes(built.model, settings.fp8_settings, settings.spec, settings.accumulate)
            layers.close()
            memory = replace(memory, parameters=memory.parameters + cast)
        return _Rank(
            pipeline=stages.pipeline,
            stages=costs,
            micro_step=micro_step,
            step=step,
            memory=memory,
            local_parameters=sum(parameter.numel() for parameter in built.model.parameters()),
            updated=sum(parameter.requires_grad for parameter in built.model.parameters()),
            microbatches=len(works),
            outer_axes=world.outer_axes,
            problem=problem,
        )


def _with_chunks(
    settings: EstimateSettings,
    zero: ZeroSpec,
    world: World,
    built: Assembled,
    stages: PipelinedModel,
    stand_in: DryRun,
    blocks: RecomputedBlocks | None,
) -> tuple[_Ran, StageProblem]:
    """Run a rank's stages under ``zero``; return what :func:`_run` does, and the problem of its planner."""
    from meshfold.planner.zero_estimate import stage_problem

    in_fp8: dict[Tensor, Fp8Weight] = {}
    if settings.fp8_settings is not None and world.data_size > 1:
        layers = use_fp8(built.model, settings.fp8_settings, world)
        in_fp8 = fp8_gathered(built.model, settings.fp8_settings, zero)
        layers.close()
    _cast(built, settings.parameter_precision)
    with dropout_stream(0, 0):
        ran = _run(settings, world, built.model, stages, stand_in, None)
        works = ran[2]
        problem = stage_problem(
            settings,
            built.model,
            world,
            lambda: stages.pipeline.rehearse(works[0]),
            stand_in,
            blocks=blocks,
            in_fp8=in_fp8,
        )
    return ran, problem


def _with_plain_states(
    settings: EstimateSettings, world: World, built: Assembled, stages: PipelinedModel, stand_in: DryRun
) -> tuple[_Ran, list[Entry], Memory]:
    """Run a rank's stages without ``zero``; return what :func:`_run` does, a step's other collectives, and the memory."""
    precision = settings.parameter_precision
    masters = Masters(built.parameters.values(), precision, other_dtypes(built.model, precision))
    pass_roles_on({parameter: masters.of(parameter) for parameter in built.parameters.values()})
    states = PlainStates(built.parameters, masters, world, None)
    parameters = list(built.model.parameters())
    states.begin(first=True)
    with dropout_stream(0, 0), states.backward("last"):
        ran = _run(settings, world, built.model, stages, stand_in, states.reducer)
        with record() as log:
            log.phase = "gradients"
            states.complete(parameters)
            states.finish(1.0)
            log.phase = "norm"
            states.norm()
    held = Memory.without_zero(
        parameters, [*states.targets.values()], settings.optimizer, fixed_bytes(built.model, settings.machine.kind)
    )
    return ran, log.entries, replace(held, channels=channel_bytes(settings.machine.reaches))


def _run(
    settings: EstimateSettings,
    world: World,
    model: nn.Module,
    stages: PipelinedModel,
    stand_in: DryRun,
    reducer: GradientReducer | None,
) -> _Ran:
    """Return the costs of the stages, the other collectives of a micro-step, and the micro-batches."""
    rows = settings.batch_size // settings.accumulate
    ids = torch.empty(rows, settings.seq_len, dtype=torch.int64, device=world.device)
    given = prepare_batch(
        shard_batch(ids, world.row_index, world.row_size),
        world.device,
        settings.parameter_precision.dtype,
        own_loss=False,
    )
    with record() as log:
        shares = Shares(given, world, mean=loss_mean(model), places=False)
        log.phase = "loss"
        all_reduce(shares.weight(), world.data_group)
    pipe, cut_here = world.mesh.size(PIPE), stages.pipeline.partition
    log.entries.append(Entry("broadcast", (PIPE,), pipe, 8, "loss"))
    zero = settings.spec.zero
    if zero is not None and zero.stage == 3:  # all ranks must agree on the number of micro-batches
        log.entries.append(Entry("all_reduce", world.data_group.axes, world.data_size, 8, "forward"))
    for tie in cut_here.ties:
        parameter = cut_here.parameter(tie.name)
        width = max(parameter.element_size(), 4)  # sums are in float32 or wider
        sent = Entry("send", (PIPE,), pipe, parameter.numel() * width, "backward")
        log.entries += [sent] * (len(tie.ranks) - 1) * parameter.requires_grad
    works = stages.microbatches(given)
    with record() as scratch:
        costs = stage_costs(stages.pipeline, works[0], scratch, stand_in, reducer, settings.machine.kind)
    return costs, log.entries, works


def _stage_entries(one: _Rank, mesh: Mesh) -> list[Entry]:
    """Return the bytes a rank's stages send in a micro-step, over tensor axes and to neighbouring stages."""
    stage_ranks, pipe = one.pipeline.stage_ranks, mesh.size(PIPE)
    found: list[Entry] = []
    for stage in one.stages:
        found += [entry for entries in stage.entries for entry in entries]
        before, after = stage.number - 1, stage.number + 1
        if after < len(stage_ranks) and stage_ranks[after] != stage.rank:
            found += [Entry("send", (PIPE,), pipe, size, "forward") for size in stage.sent]
        if before >= 0 and stage_ranks[before] != stage.rank:
            found += [Entry("send", (PIPE,), pipe, size, "backward") for size in stage.received]
    return found * one.microbatches


def _exchanged(stage: StageCosts, stage_ranks: Sequence[int]) -> int:
    """Return the tensors that a stage's F gets from stages on other ranks and sends to them."""
    before, after = stage.number - 1, stage.number + 1
    arriving = len(stage.received) if before >= 0 and stage_ranks[before] != stage.rank else 0
    leaving = len(stage.sent) if after < len(stage_ranks) and stage_ranks[after] != stage.rank else 0
    return arriving + leaving


def _simulated(one: _Rank, stages: Sequence[StageCosts], settings: EstimateSettings, mesh: Mesh) -> Simulation:
    """Simulate the schedule of a micro-step; ``auto`` searches for its order with these costs."""
    machine, stage_ranks = settings.machine, one.pipeline.stage_ranks
    seconds = [stage.seconds(machine, mesh, settings.precision, _exchanged(stage, stage_ranks)) for stage in stages]
    forward, backward, weight = ([one[i] for one in seconds] for i in range(3))
    send = []
    for stage, (source, target) in zip(stages, pairwise(stage_ranks), strict=False):
        apart = some_neighbours_apart(machine.devices, tuple(mesh.axes.items()), PIPE, source, target)
        link = machine.between if apart else machine.inside
        send.append(machine.message_seconds("send", sum(stage.sent), link))
    costs = Costs(
        forward=forward,
        backward_input=backward,
        backward_weight=weight,
        send=send,
        activation=[float(stage.activation_bytes) for stage in stages],
        kept=[min(1.0, stage.waiting_bytes / max(1, stage.activation_bytes)) for stage in stages],
    )
    if settings.spec.pipeline is not None and settings.spec.pipeline.schedule == "auto":
        one.pipeline.replan(costs)
    return simulate_costs(one.pipeline.program(one.microbatches).schedule, costs)


def _cast(built: Assembled, precision: Precision) -> None:
    """Cast the parameters as chunks do."""
    for parameter in built.model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(precision.dtype)
