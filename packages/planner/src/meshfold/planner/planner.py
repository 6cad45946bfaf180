"""Estimates of a spec before anything runs: the engine itself, on the meta device with simulated ranks.

The model is built, split and stepped as in training, on meta tensors. Collectives are recorded as they would be passed to
torch.distributed, and matmuls are counted in their calls. Rank 0 is measured: no rank has larger shards.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.engine.model import check_recompute, fp8_cast_bytes, fp8_gathered
from meshfold.engine.sequence import counted_attention
from meshfold.engine.states import PlainStates
from meshfold.mesh import Log, ParallelSpec, SpecError, all_reduce, record
from meshfold.mesh.collectives.push import channel_bytes
from meshfold.mesh.model_io import DryRun
from meshfold.mesh.parameters import metadata_on
from meshfold.mesh.processes import start_fake
from meshfold.planner.clock import Work
from meshfold.planner.estimate_settings import EstimateSettings
from meshfold.planner.estimates import Estimate, Memory, StepEstimate, summarize_traffic
from meshfold.planner.known_machines import MACHINES
from meshfold.planner.machines import Machine
from meshfold.planner.step_bytes import StepBytes, fixed_bytes
from meshfold.tensor_parallel import Report


def estimate(
    build: Callable[[], nn.Module],
    spec: ParallelSpec,
    *,
    batch_size: int,
    seq_len: int,
    precision: str = "fp32",
    fp8: str | None = None,
    fp8_gather: str = "bf16",
    optimizer: str = "adamw",
    accumulate: int = 1,
    rules: Mapping[str, str] | None = None,
    recompute: str | None = None,
    kernels: object = "auto",
    clip: bool = True,
    machine: Machine | None = None,
    name: str = "model",
) -> Estimate:
    """Measure a causal language model under a spec.

    Args:
        build: makes the model as for one device, which is never allocated.
        spec: with a world size; no process group may be running.
        batch_size: sequences of a global batch.
        seq_len: tokens of a sequence.
        precision: as for the engine.
        fp8: recipe of linear layers in fp8, with ``precision="bf16"``; the estimate lists these layers. Their products run at the
            machine's rate of fp8, if it has one, with casts that are not compiled; recipe ``block`` and pipelines are planned at
            that of bf16.
        fp8_gather: as ``gather`` in the engine's ``precision``; with ``"fp8"``, ``zero`` stage 3 gathers these weights in fp8.
        optimizer: a key of :data:`meshfold.planner.optimizer_state.MOMENTS`.
        accumulate: micro-steps of an optimizer step.
        rules: as for the engine.
        recompute: as for the engine.
        kernels: as for the engine.
        clip: clip gradients by their norm, so all of them are held at once.
        machine: the machine that ``zero`` plans for; nodes of H200s by default.
        name: of the model, for messages.

    Raises:
        SpecError: for anything that the engine refuses, and for a batch that ``accumulate`` does not divide.
    """
    if batch_size % accumulate:
        raise SpecError(f"{accumulate} micro-steps do not divide the global batch of {batch_size} sequences")
    settings = EstimateSettings(
        build=build,
        spec=spec,
        batch_size=batch_size,
        seq_len=seq_len,
        precision=precision,
        fp8=fp8,
        fp8_gather=fp8_gather,
        optimizer=optimizer,
        accumulate=accumulate,
        rules=rules,
        recompute=check_recompute(recompute, spec),
        kernels=kernels,
        clip=clip,
        machine=machine or MACHINES["h200x8"],
        name=name,
    )
    if spec.pipeline is None or spec.pipeline.size == 1:
        return _estimate_without_stages(settings)
    from meshfold.planner.pipeline_estimate import estimate_pipeline

    alone = replace(spec, pipeline=None, zero=None)
    with start_fake(alone.world_size), DryRun():
        whole = _described(settings.engine(alone, kernels="off"), alone, settings)
    return estimate_pipeline(settings, whole)


def _estimate_without_stages(settings: EstimateSettings) -> Estimate:
    """Estimate a spec under which each rank runs the whole model's forward, or its shard of it."""
    begin = time.perf_counter()
    spec, clip = settings.spec, settings.clip
    with (
        start_fake(spec.world_size),
        DryRun() as stand_in,
        counted_attention(spec, stand_in.add_attention),
    ):
        plain = replace(spec, zero=None)  # chunks are laid out from shapes alone
        engine = settings.engine(plain, kernels=settings.kernels, clip_grad_norm=1.0 if clip else None)
        rows = engine.shard_batch(torch.empty(settings.rows, settings.seq_len, dtype=torch.int64, device="meta"))
        if spec.zero is None:
            step = _plain_step(settings, engine, rows, stand_in)
        else:
            from meshfold.planner.zero_estimate import estimate_zero

            engine.states.close()  # else chunks would consume the gradients
            step = estimate_zero(
                settings, engine, lambda log: run_micro_step(engine, rows, log, nullcontext()), stand_in
            )
        cast = fp8_cast_bytes(engine.model, engine.precision.fp8, spec, settings.accumulate)
        return replace(
            _described(engine, spec, settings),
            memory=replace(step.memory, parameters=step.memory.parameters + cast),
            traffic=tuple(summarize_traffic(step.entries, engine.world.outer_axes)),
            work=step.work,
            update_bytes=step.update_bytes,
            updated=sum(parameter.requires_grad for parameter in engine.model.parameters()),
            seconds=time.perf_counter() - begin,
            plan=step.plan,
            refusal=step.refusal,
        )


def _described(engine: Engine, spec: ParallelSpec, settings: EstimateSettings) -> Estimate:
    """Return what an engine shows without a step: its parameters, and the changes to its layers."""
    report = engine.report
    return Estimate(
        spec=spec,
        world_size=spec.world_size,
        parameters=sum(math.prod(metadata_on(p, engine.mesh).placement.shape) for p in engine.model.parameters()),
        local_parameters=sum(parameter.numel() for parameter in engine.model.parameters()),
        tokens=settings.tokens,
        memory=Memory(parameters=0, masters=0, gradients=0, optimizer=0, activations=0),
        traffic=(),
        work=Work(),
        update_bytes=0,
        updated=0,
        shapes={name: source.shape for name, source in engine.model_state.sources().items()},
        summary="" if report is None else _in_a_line(report),
        report="" if report is None else str(report),
        seconds=0.0,
        fp8=_fp8_report(engine, spec, settings.fp8_gather),
    )


def _fp8_report(engine: Engine, spec: ParallelSpec, gather: str) -> str:
    """Return which layers multiply in fp8, and which weights ``zero`` gathers in it, of an engine without ``zero``."""
    layers = engine.fp8_layers
    if layers is None:
        return ""
    if engine.world.data_size > 1:
        layers.gathered = len(fp8_gathered(engine.model, engine.precision.fp8, spec.zero, gather))
    return str(layers)


def plan_memory(
    build: Callable[[], nn.Module],
    parallel: Mapping[str, object] | ParallelSpec,
    *,
    batch_size: int,
    seq_len: int,
    world_size: int | None = None,
    **settings: Any,
) -> Memory:
    """Return the bytes that a rank holds in training, without running anything; of a pipeline, of the rank that holds most.

    Args:
        build: makes a causal language model as for one device, which is never allocated.
        parallel: the spec.
        batch_size: sequences of a global batch.
        seq_len: tokens of a sequence.
        world_size: ranks; by default the product of the spec.
        settings: ``precision``, ``optimizer``, ``accumulate`` and what else
            :func:`estimate` takes.

    Raises:
        SpecError: for anything that the engine refuses.
    """
    spec = parallel if isinstance(parallel, ParallelSpec) else ParallelSpec.parse(parallel, world_size)
    spec = spec.with_world_size(world_size or spec.world_size)
    return estimate(build, spec, batch_size=batch_size, seq_len=seq_len, **settings).memory


def _plain_step(settings: EstimateSettings, engine: Engine, rows: Any, stand_in: DryRun) -> StepEstimate:
    """Run an optimizer step without ``zero`` on meta tensors, and return what it holds, sends and computes."""
    states, kind, accumulate = engine.states, settings.machine.kind, settings.accumulate
    assert isinstance(states, PlainStates)  # there is no zero entry
    earlier, last = Log(), Log()
    work, peak = Work(), StepBytes(states.reducer, kind=kind, base_bytes=fixed_bytes(engine.model, kind))
    for log, number in ((earlier, accumulate - 1), (last, 1)):
        if number:
            with Work.counted(stand_in, peak, kind=kind) as counter, record() as found:
                _micro_step(engine, rows, found, first=log is earlier or accumulate == 1, last=log is last)
            log.entries = found.entries * number
            work += Work.of(counter) * number
    state = Memory.without_zero([*engine.model.parameters()], [*states.targets.values()], settings.optimizer)
    return StepEstimate(
        entries=[*earlier.entries, *last.entries],
        work=work,
        memory=replace(peak.with_state(state), channels=channel_bytes(settings.machine.reaches)),
        update_bytes=state.update_bytes(clip=settings.clip),
    )


def _micro_step(engine: Engine, rows: Any, log: Log, *, first: bool, last: bool) -> None:
    """Issue the collectives of ``train_step`` without reading values: meta tensors have none."""
    engine.states.begin(first=first)
    run_micro_step(engine, rows, log, engine.states.backward("last" if last else "more"))
    if last:
        log.phase = "backward"
        engine.states.finish(1.0)
        log.phase = "norm"
        engine.states.norm()


def run_micro_step(engine: Engine, rows: Any, log: Log, around: AbstractContextManager[None]) -> None:
    """Run a micro-step and record its collectives in the log; ``around``: the context of its backward."""
    work, shares = engine.runner.prepare(rows)

    def backward(part: Tensor) -> None:
        log.phase = "backward"
        with around:
            part.backward()

    loss = engine.runner.loss_and_gradients(work, shares, backward)
    log.phase = "loss"
    all_reduce(loss, engine.world.data_group)


def _in_a_line(report: Report) -> str:
    """Format a report as one line: ``mode 2d places 1 embedding, 4 column, ...``."""
    roles = Counter(placed.role for placed in report.placed)
    counts = ", ".join(f"{count} {role.replace('_', ' ')}" for role, count in roles.items())
    return f"mode {report.mode} places {counts}"
