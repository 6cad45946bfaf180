"""Planning for the entry ``zero``: a step on tensors without values, the planner's problem, and the plan that a placement means."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from meshfold.engine.planning.machines import Machine
from meshfold.engine.planning.without_values import WithoutValues
from meshfold.engine.precision import Precision, other_dtypes
from meshfold.engine.zero.homes import gradient_dtype
from meshfold.engine.zero.process_memory import PROCESS_BYTES
from meshfold.mesh import Entry, Log, Mesh, SpecError, record
from meshfold.mesh.spec import ZeroSpec
from meshfold.zero_gemini import MemoryPlanError
from meshfold.zero_gemini.disk import free_bytes
from meshfold.zero_gemini.members import slot_align
from meshfold.zero_gemini.planner import (
    REGIMES,
    Limits,
    Plan,
    Regime,
    Workload,
    const,
    cpu,
    cuda,
    on_device,
    plan,
    static,
    timeline,
)
from meshfold.zero_gemini.planner import Machine as Rates
from meshfold.zero_gemini.planner.memory import windows
from meshfold.zero_gemini.trace import LiveBytes, OperatorClock, StepTracer, Trace, chunk_uses, workload_of

if TYPE_CHECKING:
    from meshfold.engine.engine import Engine
    from meshfold.engine.planning.estimate import Memory
    from meshfold.engine.recompute import RecomputedBlocks

WORKSPACE_BYTES = 66 * 2**20
"""What cuBLAS keeps of a GPU as long as it is used: two workspaces of 32 MiB and a little (measured on an H200)."""
MATMULS = 0.86
"""Share of one large matmul's rate that those of a model reach, one after the other (measured: OPT-6.7B on an H200)."""
NEAR = 1.05
"""How much longer a step with everything on the device may take than the fastest plan."""
ATTENTION = 0.55
"""Share of a large matmul's rate that attention reaches."""


def regime_of(
    spec: ZeroSpec, precision: Precision, *, accumulation: int, ranks: int, moments: int = 2
) -> Regime:
    """Bytes an element under an entry ``zero``.

    Args:
        spec: the entry.
        precision: of the model.
        accumulation: micro-steps of an optimizer step.
        ranks: that share a chunk.
        moments: numbers that the optimizer keeps for an element; Adam's two in float32 have kernels of ours.
    """
    gradient = gradient_dtype(precision, accumulation=accumulation, ranks=ranks).itemsize
    if (
        precision.name == "fp64" or moments != 2
    ):  # stepped by torch: reads all and writes all but the gradient
        width, true = precision.dtype.itemsize, precision.master_dtype.itemsize
        state = true * (moments + (true != width))
        step = gradient + 2 * (width + state)
        return Regime(
            name=f"{moments} moments", parameter=width, state=state, gradient=gradient, step=step, first_pass=step,
            second_pass=0,
        )  # fmt: skip
    found = REGIMES[spec.regime if precision.name == "bf16" else precision.name]
    more = gradient - found.gradient  # each pass reads it once
    return replace(
        found, gradient=gradient, step=found.step + more, first_pass=found.first_pass + more,
        second_pass=found.second_pass + more,
    )  # fmt: skip


def plan_for(spec: ZeroSpec, workload: Workload, rates: Rates, limits: Limits) -> Plan:
    """The plan that a spec's placement asks for.

    ``auto`` keeps everything on the device where that fits and nothing else is faster by more than a twentieth: to step
    a few chunks on the host saves a little of the device's time, as long as nothing disturbs the host. Of the activations
    that may be recomputed as many are kept there as fit.

    Raises:
        MemoryPlanError: if it does not fit; it says the least that would.
        SpecError: for shares that cannot be.
    """
    if spec.placement == "auto":
        found = plan(workload, rates, limits)
        try:
            simple = on_device(workload, rates, limits)
        except MemoryPlanError:
            return found
        return replace(simple, policy="auto") if simple.seconds <= NEAR * found.seconds else found
    if spec.placement == "static":
        optimizer, parameters = spec.offload_optim_frac or 0.0, spec.offload_param_frac or 0.0
        if parameters and spec.stage < 3:
            raise SpecError(
                f"zero: offload_param_frac={parameters} with stage={spec.stage}, which keeps all parameters on the "
                "device: write stage=3, or leave it out"
            )
        return static(workload, rates, limits, offload_optim_frac=optimizer, offload_param_frac=parameters)
    return {"cuda": cuda, "cpu": cpu, "const": const}[spec.placement](workload, rates, limits)


def limits_of(spec: ZeroSpec) -> Limits:
    """What a plan may use, as far as the spec says; of a disk the free space of the folder, if it is there."""
    disk: int | None = 0
    if spec.offload_path is not None:
        folder = Path(spec.offload_path)
        disk = free_bytes(folder) if folder.is_dir() else None
    return Limits(gpu_bytes=spec.gpu_memory_limit, host_bytes=spec.host_memory_limit, disk_bytes=disk)


@dataclass(frozen=True, kw_only=True)
class ZeroEstimate:
    """A spec with ``zero``, measured without running; fields as those of :class:`meshfold.engine.planning.estimate.Estimate`."""

    entries: list[Entry]
    flops: int
    memory: Memory
    workload: Workload
    plan: Plan | None
    refusal: str


def estimate_zero(
    engine: Engine,
    spec: ZeroSpec,
    micro_step: Callable[[Log], None],
    stand_in: WithoutValues,
    *,
    machine: Machine,
    tokens: int,
    accumulation: int,
    moments: int,
    name: str,
    blocks: RecomputedBlocks | None = None,
    recomputed: bool = False,
) -> ZeroEstimate:
    """Trace a micro-step of an engine without ``zero`` on the meta device, and plan as if it had it.

    Blocks that the plan lets keep their activations do so when this returns.

    Args:
        engine: with the model; nobody else takes up gradients.
        spec: the entry.
        micro_step: forward and backward, telling a log of its phase.
        stand_in: under which it runs.
        machine: what to plan for.
        tokens: of this rank in an optimizer step.
        accumulation: micro-steps of an optimizer step.
        moments: numbers that the optimizer keeps for an element.
        name: of the model.
        blocks: those whose activations the plan may keep.
        recomputed: blocks recompute their activations, all of them.
    """
    world, precision = engine._world, engine._precision
    ranks, local = world.data_size, min(machine.devices, world.mesh.world_size)

    def traced() -> tuple[Trace, int, Log]:
        with record() as log:
            trace, flops = trace_without_values(
                engine.model, lambda: micro_step(log), stand_in, machine, precision, blocks
            )
        return with_collectives(trace, log, world.mesh, machine), flops, log

    trace, flops, log = traced()
    workload = workload_of(
        trace,
        chunk_uses(
            engine.model,
            world.mesh,
            dtype=precision.dtype,
            other_dtypes=other_dtypes(engine.model, precision),
            slot_align_elems=slot_align(spec.regime),
        ),
        name=name,
        regime=regime_of(spec, precision, accumulation=accumulation, ranks=ranks, moments=moments),
        tokens=tokens,
        stage=spec.stage,
        accumulation=accumulation,
        data_ranks=ranks,
        ranks_per_host=local,
        host_base_bytes=PROCESS_BYTES,
        reshards=spec.reshard_after_forward,
        # Adam alone steps chunk by chunk in the backward.
        clipping=engine._looks_at_all or moments != 2 or precision.name == "fp64",
    )
    workload = replace(workload, recomputed=recomputed)
    rates = machine.rates(precision.name, mesh=world.mesh, axes=world.outer_axes, ranks=local)
    found, refusal = None, ""
    try:
        found = plan_for(spec, workload, rates, limits_of(spec))
    except MemoryPlanError as error:
        refusal = str(error)
    if found is not None and blocks is not None:
        blocks.keep([layer.name for layer in found.layers if layer.kept])
        _, flops, log = traced()  # what is kept is not computed, and its collectives are not made, once more
    roomy = replace(rates, gpu_bytes=PLENTY, host_bytes=PLENTY, disk_bytes=PLENTY)
    return ZeroEstimate(
        entries=[*log.entries * accumulation, *chunk_entries(workload, world.outer_axes, world.mesh)],
        flops=flops * accumulation,
        memory=memory_of(found or plan_for(replace(spec, placement="cuda"), workload, roomy, Limits())),
        workload=workload,
        plan=found,
        refusal=refusal,
    )


PLENTY = 2**60


def trace_without_values(
    model: nn.Module,
    micro_step: Callable[[], None],
    stand_in: WithoutValues,
    machine: Machine,
    precision: Precision,
    blocks: RecomputedBlocks | None = None,
) -> tuple[Trace, int]:
    """A trace of a model on the meta device with a machine's rates, and the operations that were counted.

    Args:
        model: on the meta device.
        micro_step: forward and backward; gradients are let go as soon as they are there, as chunks do it.
        stand_in: under which it runs.
        machine: whose rates.
        precision: of the model.
        blocks: whose recomputing is watched.
    """
    base = sum(map(_bytes, model.buffers())) + WORKSPACE_BYTES
    clock = OperatorClock(flops=MATMULS * machine.flops[precision.name], bytes_per_second=machine.memory_rate)
    handles = [
        parameter.register_post_accumulate_grad_hook(_let_go)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    stand_in.on_attention = lambda flop: clock.add(flop=flop, efficiency=ATTENTION)
    try:
        with ExitStack() as stack:
            tracer = StepTracer(model, memory=LiveBytes(base_bytes=base, round_bytes=512), clock=clock)
            if blocks is not None:
                stack.enter_context(blocks.watched(tracer.layers))
            stack.enter_context(tracer)
            micro_step()
    finally:
        stand_in.on_attention = None
        for handle in handles:
            handle.remove()
    return tracer.trace(), clock.flop


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def with_collectives(trace: Trace, log: Log, mesh: Mesh, machine: Machine) -> Trace:
    """With the seconds of what was sent over tensor axes, shared out to the moments of its half like their compute."""
    moments, layers = list(trace.moments), list(trace.layers)
    for phase in ("forward", "backward"):
        sent = [entry for entry in log.entries if entry.phase == phase and entry.group_size > 1]
        spent = sum(
            machine.latency + float(entry.bytes) / machine.slowest(mesh, entry.axes) for entry in sent
        )
        half = [i for i, moment in enumerate(moments) if moment.backward == (phase == "backward")]
        whole = sum(moments[i].seconds for i in half)
        for i in half:
            share = moments[i].seconds / whole if whole else 1 / len(half)
            moments[i] = replace(moments[i], seconds=moments[i].seconds + spent * share)
        if phase == "backward" and whole:  # recomputing sends what its forward sent
            layers = [replace(layer, seconds=layer.seconds * (1.0 + spent / whole)) for layer in layers]
    return Trace(moments=tuple(moments), layers=tuple(layers))


def chunk_entries(workload: Workload, axes: tuple[str, ...], mesh: Mesh) -> list[Entry]:
    """The collectives on chunks in an optimizer step."""
    ranks, entries = workload.data_ranks, []
    if ranks == 1:
        return []
    for chunk in workload.chunks:
        gathered = int(workload.regime.parameter * chunk.gathered_elems)
        reduced = int(workload.regime.gradient * chunk.gathered_elems)
        # Under stages 1 and 2 parameters are gathered once, when they have been stepped.
        uses = (
            len(windows(chunk, workload)) * workload.accumulation if workload.stage == 3 else chunk.trainable
        )
        entries += [Entry("all_gather", axes, ranks, gathered, "parameters")] * uses
        once = workload.stage == 1 or workload.whole_gradients
        sums = (1 if once else workload.accumulation) * chunk.trainable
        entries += [Entry("reduce_scatter", axes, ranks, reduced, "gradients")] * sums
    number = Entry("all_reduce", mesh.names, mesh.world_size, 8, "norm")
    return [*entries, number]


def memory_of(found: Plan) -> Memory:
    """What a plan holds at its fullest moment."""
    from meshfold.engine.planning.estimate import Memory

    kinds = max(timeline(found), key=lambda moment: moment.bytes).kinds
    return Memory(
        parameters=kinds["resident parameters"] + kinds["gathered"],
        masters=0,
        gradients=kinds["gradients"],
        optimizer=kinds["optimizer state"],
        activations=kinds["non-model"] + kinds["kept activations"],
        host=found.peak_host_bytes,
        disk=found.peak_disk_bytes,
    )
