"""Estimates of ``zero``: a step, or a rank's pipeline stages, traced on meta tensors, and the plan for their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshfold.engine.model import EVERY_BLOCK, RecomputedBlocks, fp8_gathered
from meshfold.engine.precision import Precision, other_dtypes
from meshfold.engine.world import World
from meshfold.engine.zero import (
    PROCESS_BYTES,
    InFlight,
    largest_output,
    regime_of,
    workload_in_flight,
)
from meshfold.kernels import Fp8Weight
from meshfold.mesh import Entry, Log, Mesh, record
from meshfold.mesh.collectives.push import pushes
from meshfold.mesh.model_io import DryRun, OperatorCounter
from meshfold.mesh.spec import ZeroSpec
from meshfold.planner.clock import Work, kernels_of, operator_seconds
from meshfold.planner.collected_gradients import moved_bytes, taking
from meshfold.planner.estimate_settings import EstimateSettings
from meshfold.planner.estimates import Memory, StepEstimate
from meshfold.planner.machines import Machine
from meshfold.planner.node_groups import leaves_node
from meshfold.planner.optimizer_state import kept_under_zero, steps_early
from meshfold.planner.step_bytes import allocation_bytes, fixed_bytes
from meshfold.planner.zero_limits import Outside, fit
from meshfold.zero_gemini import slot_alignment
from meshfold.zero_gemini.planner import Machine as Rates
from meshfold.zero_gemini.planner import Plan, Regime, Workload, gather_windows
from meshfold.zero_gemini.profiler import (
    ChunkUse,
    LiveBytes,
    OperatorClock,
    StepTracer,
    Trace,
    chunk_uses,
    workload_of,
)

if TYPE_CHECKING:
    from meshfold.engine import Engine


def estimate_zero(
    settings: EstimateSettings, engine: Engine, micro_step: Callable[[Log], None], stand_in: DryRun
) -> StepEstimate:
    """Trace a micro-step of an engine without ``zero`` on the meta device, and plan as if it had it.

    When this returns, blocks keep their activations as the plan says.

    Args:
        settings: of the estimate, with an entry ``zero``.
        engine: with the model; no other code takes gradients.
        micro_step: runs forward and backward, and sets the phase of a log.
        stand_in: context in which it runs.
    """
    spec, machine, accumulation = zero_of(settings), settings.machine, settings.accumulate
    world, precision = engine.world, engine.precision
    ranks, local = world.data_size, min(machine.devices, world.mesh.world_size)
    tokens = settings.tokens // ranks
    blocks = engine.recomputed_blocks if settings.recompute == "auto" else None
    kept = kept_under_zero(settings.optimizer, engine.model, world, precision, spec)
    regime = regime_of(spec, precision, accumulation=accumulation, ranks=ranks, **kept._asdict())
    each = moved_bytes(spec, regime, ranks=ranks, accumulation=accumulation)

    def traced() -> tuple[Trace, OperatorCounter, Log]:
        with record() as log:
            trace, counted = trace_without_values(
                engine.model, lambda: micro_step(log), stand_in, machine, precision, blocks, (each, regime)
            )
        return with_collectives(trace, log, world.mesh, machine), counted, log

    trace, counted, log = traced()
    workload = workload_of(
        trace,
        chunk_uses(
            engine.model,
            world.mesh,
            dtype=precision.dtype,
            other_dtypes=other_dtypes(engine.model, precision),
            slot_align_elems=slot_alignment(spec.regime),
            stays=spec.placement == "cuda",
            in_fp8=fp8_gathered(engine.model, precision.fp8, spec, settings.fp8_gather) if ranks > 1 else {},
            pushed=pushed_on(machine, world.mesh, spec.transport),
        ),
        name=settings.name,
        regime=regime,
        tokens=tokens,
        stage=spec.stage,
        accumulation=accumulation,
        data_ranks=ranks,
        ranks_per_host=local,
        host_base_bytes=PROCESS_BYTES,
        reshards=spec.reshard_after_forward,
        clipping=engine.runner.needs_all_gradients
        or not steps_early(settings.optimizer, precision.name, disk=spec.offload_path is not None),
    )
    recomputed = settings.recompute in EVERY_BLOCK
    workload = replace(workload, recomputed=recomputed, **largest_output(engine.model, tokens // accumulation))
    rates = machine.rates(precision.name, mesh=world.mesh, axes=world.outer_axes, ranks=local)
    found, refusal, memory = fit(spec, workload, rates, Outside.of(machine))
    if found is not None and blocks is not None:
        blocks.keep([layer.name for layer in found.layers if layer.kept])
        _, counted, log = traced()  # layers that keep activations are not recomputed, nor their collectives repeated
    return StepEstimate(
        entries=[*log.entries * accumulation, *chunk_entries(workload, world, found)],
        work=replace(Work.of(counted), units=trace.forward_timesteps) * accumulation,
        memory=memory,
        plan=found,
        refusal=refusal,
    )


def zero_of(settings: EstimateSettings) -> ZeroSpec:
    """Return the entry ``zero`` of a spec that has one."""
    assert settings.spec.zero is not None  # asked by the caller
    return settings.spec.zero


def pushed_on(machine: Machine, mesh: Mesh, transport: str) -> Callable[[tuple[str, ...], int], bool]:
    """Return a predicate: whether copy engines carry a chunk, given the axes that share it and the bytes of a shard."""
    gpu = torch.device("cuda")

    def pushed(axes: tuple[str, ...], block_bytes: int) -> bool:
        return pushes(transport, block_bytes, gpu) and not leaves_node(machine.devices, tuple(mesh.axes.items()), axes)

    return pushed


def trace_without_values(
    model: nn.Module,
    micro_step: Callable[[], None],
    stand_in: DryRun,
    machine: Machine,
    precision: Precision,
    blocks: RecomputedBlocks | None,
    collected: tuple[float, Regime],
) -> tuple[Trace, OperatorCounter]:
    """Return a trace of a model on the meta device with a machine's rates, and the operators that were counted.

    Args:
        model: on the meta device.
        micro_step: forward and backward; gradients are released as soon as they arrive, as in chunks.
        stand_in: context in which it runs.
        machine: its rates are used.
        precision: of the model.
        blocks: their recomputation is observed.
        collected: bytes moved to put an element's gradient into its chunk, and those that elements take.
    """
    live = LiveBytes(base_bytes=fixed_bytes(model, machine.kind), round_bytes=allocation_bytes(machine.kind))
    clock = OperatorClock(lambda operator: operator_seconds(operator, machine, precision.name))
    arrive = taking(clock.note, *collected)
    handles = [
        parameter.register_post_accumulate_grad_hook(arrive)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    stand_in.counter = clock  # the tracer enters it
    stand_in.on_gpu = machine.kind == "gpu"
    try:
        with ExitStack() as stack:
            tracer = StepTracer(model, memory=live, clock=clock)
            if blocks is not None:
                stack.enter_context(blocks.watched(tracer.layers))
            stack.enter_context(kernels_of(machine.kind, clock, live))
            stack.enter_context(tracer)
            micro_step()
    finally:
        stand_in.counter = None
        for handle in handles:
            handle.remove()
    return tracer.trace(), clock


def with_collectives(trace: Trace, log: Log, mesh: Mesh, machine: Machine) -> Trace:
    """Add the seconds of collectives over tensor axes to a trace, divided among the timesteps of a half as compute is."""
    timesteps, layers = list(trace.timesteps), list(trace.layers)
    for phase in ("forward", "backward"):
        sent = [entry for entry in log.entries if entry.phase == phase and entry.group_size > 1]
        spent = sum(
            machine.message_seconds(
                entry.kind,
                float(entry.bytes),
                machine.slowest(mesh, entry.axes, entry.kind),
                ranks=entry.group_size,
            )
            for entry in sent
        )
        half = [i for i, timestep in enumerate(timesteps) if timestep.backward == (phase == "backward")]
        whole = sum(timesteps[i].seconds for i in half)
        for i in half:
            share = timesteps[i].seconds / whole if whole else 1 / len(half)
            timesteps[i] = replace(timesteps[i], seconds=timesteps[i].seconds + spent * share)
        if phase == "backward" and whole:  # recomputation repeats the forward's messages
            layers = [replace(layer, seconds=layer.seconds * (1.0 + spent / whole)) for layer in layers]
    return Trace(timesteps=tuple(timesteps), layers=tuple(layers))


def chunk_entries(workload: Workload, world: World, plan: Plan | None) -> list[Entry]:
    """Return the collectives on chunks in an optimizer step.

    Args:
        workload: with all chunks.
        world: whose ranks share them.
        plan: says which shards are on the host, and so are not gathered in fp8; None: none is.
    """
    mesh, entries = world.mesh, list[Entry]()
    on_host = set() if plan is None else {each.name for each in plan.chunks if each.parameters != "gpu"}
    if workload.data_ranks == 1 and world.spec.expert is None:
        return []
    # Ranks that share a chunk: data ranks; ranks with the same experts; for a router, also those along tensor axes.
    sharing = {mesh.size(*axes): axes for axes in (world.token_axes, world.spec.expert_data_axes, world.outer_axes)}
    for chunk in workload.chunks:
        ranks = chunk.gathered_elems // chunk.elems
        if ranks == 1:
            continue
        axes = mesh.spanned(*sharing.get(ranks, world.outer_axes))
        in_fp8 = chunk.fp8 and chunk.name not in on_host
        gathered = chunk.gathered_elems if in_fp8 else int(workload.regime.parameter * chunk.gathered_elems)
        reduced = int(workload.collected(chunk) * chunk.gathered_elems)
        # Stages 1 and 2 gather parameters once, after the optimizer step.
        windows = gather_windows(chunk, workload)
        again = second_operands(windows, workload) if in_fp8 and chunk.fp8 > 1 else 0
        uses = (len(windows) + again) * workload.accumulation if workload.stage == 3 else chunk.trainable
        entries += [Entry("all_gather", axes, ranks, gathered, "parameters")] * uses
        sums = (1 if workload.sums_once else workload.accumulation) * chunk.trainable
        entries += [Entry("reduce_scatter", axes, ranks, reduced, "gradients")] * sums
    number = Entry("all_reduce", mesh.names, mesh.world_size, 8, "norm")
    return [*entries, number]


def second_operands(windows: Sequence[tuple[int, int]], workload: Workload) -> int:
    """Return the number of a chunk's windows in which both of its operands in fp8 are gathered.

    Forward and backward read different operands: a window over both gathers two, and so does one in a backward that recomputes.
    """
    turn = workload.forward_timesteps
    both = sum(first < turn <= last for first, last in windows)
    recomputed = sum(last >= turn for _, last in windows) if workload.recomputed else 0
    return max(both, recomputed)


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A rank's plan, or why it was refused; its memory; and the collectives on its chunks in an optimizer step."""

    plan: Plan | None
    refusal: str
    memory: Memory
    entries: list[Entry]


@dataclass(frozen=True, kw_only=True)
class StageProblem:
    """A rank's stages traced on meta tensors; only the number of micro-batches held at once is still open."""

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
    outside: Outside
    recomputed: bool = False

    def solved(self, live: int, stages: int, microbatches: int) -> Solved:
        """Return the plan for a number of micro-batches in flight.

        Args:
            live: pairs of stage and micro-batch that the rank holds at most.
            stages: of the rank.
            microbatches: of a micro-step.
        """
        one = workload_of(
            self.trace,
            self.chunks,
            name=self.name,
            regime=self.regime,
            tokens=self.tokens,
            stage=self.spec.stage,
            accumulation=self.accumulation * microbatches,
            data_ranks=self.world.data_size,
            ranks_per_host=self.ranks_per_host,
            host_base_bytes=PROCESS_BYTES,
            reshards=self.spec.reshard_after_forward,
            whole_gradients=self.world.data_size > 1,
        )
        flying = InFlight(live=live, stages=stages, microbatches=microbatches)
        workload = replace(workload_in_flight(one, self.trace, flying), recomputed=self.recomputed)
        found, refusal, memory = fit(self.spec, workload, self.rates, self.outside)
        return Solved(
            plan=found,
            refusal=refusal,
            memory=memory,
            entries=chunk_entries(workload, self.world, found),
        )


def stage_problem(
    settings: EstimateSettings,
    model: nn.Module,
    world: World,
    rehearse: Callable[[], None],
    stand_in: DryRun,
    *,
    blocks: RecomputedBlocks | None,
    in_fp8: Mapping[Tensor, Fp8Weight],
) -> StageProblem:
    """Trace a rank's stages on one micro-batch.

    Args:
        settings: of the estimate, with entries ``zero`` and ``pipeline``.
        model: the rank's part, on the meta device.
        world: its ranks.
        rehearse: F and backward of the stages.
        stand_in: context in which it runs.
        blocks: those whose activations the plan may keep.
        in_fp8: weights that are gathered in fp8.
    """
    spec, machine, precision = zero_of(settings), settings.machine, settings.parameter_precision
    local = min(machine.devices, world.mesh.world_size)
    accumulation, ranks = max(2, settings.accumulate), world.data_size
    kept = kept_under_zero(settings.optimizer, model, world, precision, spec)
    regime = regime_of(spec, precision, accumulation=accumulation, ranks=ranks, **kept._asdict())
    each = moved_bytes(spec, regime, ranks=ranks, accumulation=accumulation)
    with record() as log:
        trace, _ = trace_without_values(model, rehearse, stand_in, machine, precision, blocks, (each, regime))
    chunks = chunk_uses(
        model,
        world.mesh,
        dtype=precision.dtype,
        other_dtypes=other_dtypes(model, precision),
        slot_align_elems=slot_alignment(spec.regime),
        stays=spec.placement == "cuda",
        in_fp8=in_fp8,
        pushed=pushed_on(machine, world.mesh, spec.transport),
    )
    return StageProblem(
        trace=with_collectives(trace, log, world.mesh, machine),
        chunks=chunks,
        spec=spec,
        world=world,
        regime=regime,
        rates=machine.rates(precision.name, mesh=world.mesh, axes=world.outer_axes, ranks=local),
        tokens=settings.tokens // world.data_size,
        accumulation=settings.accumulate,
        ranks_per_host=local,
        name=settings.name,
        outside=Outside.of(machine),
        recomputed=settings.recompute in EVERY_BLOCK,
    )
