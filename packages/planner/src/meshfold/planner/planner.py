"""Estimates of a spec before anything runs: the engine itself, on the meta device with simulated ranks.

The model is built, split and stepped as in training, on meta tensors. Collectives are recorded as they would be passed to
torch.distributed, and matmuls are counted in their calls. Rank 0 is measured: no rank has larger shards.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.engine.model import check_recompute, fp8_cast_bytes, fp8_gathered
from meshfold.engine.sequence import counted_attention
from meshfold.engine.states import PlainStates
from meshfold.mesh import Entry, Log, MeshfoldError, ParallelSpec, SpecError, all_reduce, record
from meshfold.mesh.collectives.push import channel_bytes
from meshfold.mesh.model_io import DryRun
from meshfold.mesh.parameters import metadata_on
from meshfold.mesh.processes import start_fake
from meshfold.mesh.spec import format_bytes
from meshfold.planner.clock import Work
from meshfold.planner.estimates import MOMENTS, Estimate, Memory, summarize_traffic
from meshfold.planner.machines import MACHINES, Machine
from meshfold.planner.step_bytes import StepBytes, fixed_bytes
from meshfold.tensor_parallel import Report

if TYPE_CHECKING:
    from meshfold.planner.zero_estimate import ZeroEstimate


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
        fp8: recipe of linear layers in fp8, with ``precision="bf16"``: the estimate says which are. Their products run at the
            machine's rate of fp8, if it has one, with casts that are not compiled; recipe ``block`` and pipelines at that of bf16.
        fp8_gather: as ``gather`` in the engine's ``precision``: ``"fp8"``: ``zero`` stage 3 gathers these weights in fp8.
        optimizer: a key of :data:`meshfold.planner.estimates.MOMENTS`.
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
    recompute = check_recompute(recompute, spec)
    on = machine or MACHINES["h200x8"]
    settings: dict[str, Any] = dict(
        precision=precision if fp8 is None else dict(name=precision, matmul="fp8", recipe=fp8),
        device="meta",
        rules=rules,
        recompute=None if recompute is None else "blocks",
    )
    if spec.pipeline is not None and spec.pipeline.size > 1:
        from meshfold.planner.pipeline_estimate import estimate_pipeline

        asked: dict[str, Any] = dict(
            batch_size=batch_size,
            seq_len=seq_len,
            precision=precision,
            fp8=fp8,
            fp8_gather=fp8_gather,
            optimizer=optimizer,
            accumulate=accumulate,
            rules=rules,
            recompute=recompute,
            kernels=kernels,
            machine=on,
            clip=clip,
            name=name,
        )
        alone = replace(spec, pipeline=None, zero=None)
        with start_fake(alone.world_size), DryRun():
            engine = Engine(build, alone, kernels="off", **settings)
            whole = _described(engine, alone, batch_size * seq_len, fp8_gather)
        return estimate_pipeline(build, spec, whole, **asked)
    begin = time.perf_counter()
    with (
        start_fake(spec.world_size),
        DryRun() as stand_in,
        counted_attention(spec, stand_in.add_attention),
    ):
        plain = replace(spec, zero=None)  # chunks are laid out from shapes alone
        engine = Engine(build, plain, kernels=kernels, clip_grad_norm=1.0 if clip else None, **settings)
        rows = engine.shard_batch(torch.empty(batch_size // accumulate, seq_len, dtype=torch.int64, device="meta"))
        zero: ZeroEstimate | None = None
        update_bytes = 0
        if spec.zero is None:
            entries, work, state, memory = _plain_steps(engine, rows, accumulate, stand_in, optimizer, on.kind)
            update_bytes = state.update_bytes(clip=clip)
            memory = replace(memory, channels=channel_bytes(on.reaches))
        else:
            from meshfold.planner.zero_estimate import estimate_zero

            engine.states.close()  # else chunks would consume the gradients
            zero = estimate_zero(
                engine,
                spec.zero,
                lambda log: run_micro_step(engine, rows, log, nullcontext()),
                stand_in,
                machine=on,
                tokens=batch_size * seq_len // engine.world.data_size,
                accumulation=accumulate,
                moments=MOMENTS[optimizer],
                name=name,
                blocks=engine.recomputed_blocks if recompute == "auto" else None,
                recomputed=recompute == "blocks",
                fp8_gather=fp8_gather,
            )
            entries, work, memory = zero.entries, zero.work, zero.memory
        cast = fp8_cast_bytes(engine.model, engine.precision.fp8, spec, accumulate)
        memory = replace(memory, parameters=memory.parameters + cast)
        return replace(
            _described(engine, spec, batch_size * seq_len, fp8_gather),
            memory=memory,
            traffic=tuple(summarize_traffic(entries, engine.world.outer_axes)),
            work=work,
            update_bytes=update_bytes,
            updated=sum(parameter.requires_grad for parameter in engine.model.parameters()),
            seconds=time.perf_counter() - begin,
            plan=None if zero is None else zero.plan,
            refusal="" if zero is None else zero.refusal,
        )


def _described(engine: Engine, spec: ParallelSpec, tokens: int, fp8_gather: str) -> Estimate:
    """Return what an engine shows without a step: its parameters, and the changes to its layers."""
    report = engine.report
    return Estimate(
        spec=spec,
        world_size=spec.world_size,
        parameters=sum(math.prod(metadata_on(p, engine.mesh).placement.shape) for p in engine.model.parameters()),
        local_parameters=sum(parameter.numel() for parameter in engine.model.parameters()),
        tokens=tokens,
        memory=Memory(parameters=0, masters=0, gradients=0, optimizer=0, activations=0),
        traffic=(),
        work=Work(),
        update_bytes=0,
        updated=0,
        shapes={name: source.shape for name, source in engine.model_state.sources().items()},
        summary="" if report is None else _in_a_line(report),
        report="" if report is None else str(report),
        seconds=0.0,
        fp8=_fp8_report(engine, spec, fp8_gather),
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


def _plain_steps(
    engine: Engine, rows: Any, accumulate: int, stand_in: DryRun, optimizer: str, kind: str
) -> tuple[list[Entry], Work, Memory, Memory]:
    """Return the collectives and operators of a step without ``zero``, and the memory before its end and at its peak."""
    states = engine.states
    assert isinstance(states, PlainStates)  # there is no zero entry
    parameters = list(engine.model.parameters())
    targets = list(states.targets.values())
    earlier, last = Log(), Log()
    work, peak = Work(), StepBytes(states.reducer, kind=kind, base_bytes=fixed_bytes(engine.model, kind))
    for log, number in ((earlier, accumulate - 1), (last, 1)):
        if number:
            with Work.counted(stand_in, peak, kind=kind) as counter, record() as found:
                _micro_step(engine, rows, found, first=log is earlier or accumulate == 1, last=log is last)
            log.entries = found.entries * number
            work += Work.of(counter) * number
    state = Memory.without_zero(parameters, targets, optimizer)
    return [*earlier.entries, *last.entries], work, state, peak.with_state(state)


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


Again = Callable[[ParallelSpec, str | None, int], Estimate]
"""Estimates the same model under another spec, another ``recompute`` and another number of micro-steps."""

_MOST = 6  # changes to try; each takes as long as the plan itself


def fits(found: Estimate, machine: Machine) -> bool:
    """Return True if a rank's state and activations fit in its device's memory; under ``zero`` the plan decides."""
    if found.spec.zero is not None:
        return not found.refusal
    return found.memory.total <= machine.memory


def explain_misfit(found: Estimate, machine: Machine) -> str:
    """Return a sentence that says what does not fit; empty if all fits."""
    if fits(found, machine):
        return ""
    return found.refusal or (
        f"a rank holds {format_bytes(found.memory.total)}, and a device of {machine.name} has {format_bytes(machine.memory)}"
    )


def suggest_change(
    found: Estimate, machine: Machine, recompute: str | None, rows: int, again: Again, *, accumulate: int = 1
) -> str:
    """Return the first change that makes it fit, or that none of the tried ones does.

    Args:
        found: the estimate that does not fit.
        machine: that it is for.
        recompute: as requested.
        rows: sequences of a micro-step on a data rank, which micro-batches divide.
        again: estimates under a change.
        accumulate: micro-steps of a step, as requested.
    """

    def helps(spec: ParallelSpec, blocks: str | None, micro_steps: int) -> bool | None:
        """Return True if it fits then; None if the change is refused."""
        try:
            return fits(again(spec, blocks, micro_steps), machine)
        except MeshfoldError:
            return None

    tried = []
    for words, spec, blocks in _changes(found, recompute, rows):
        found_to_fit = helps(spec, blocks, accumulate)
        if found_to_fit:
            return f"With {words} it fits"
        tried += [words] * (found_to_fit is False)
        if len(tried) == _MOST:
            break
    splits = [] if found.pipeline is not None else [2**power for power in range(1, 12) if rows % 2**power == 0]
    blocks, also = recompute or "blocks", "" if recompute else " and --recompute blocks"
    if splits:  # the fewest tokens at once first: if they are too many, so are all others
        fitting = helps(found.spec, blocks, accumulate * splits[-1])
        if fitting:
            least = next(n for n in splits if n == splits[-1] or helps(found.spec, blocks, accumulate * n))
            return f"With --accumulate {accumulate * least}{also} it fits"
        tried += [f"--accumulate {accumulate * splits[-1]}{also}"] * (fitting is False)
    beside = f" ({', '.join(tried)} would not be enough)" if tried else ""
    return f"Split it over more ranks, take fewer tokens at once, or give it a larger device{beside}"


def _changes(found: Estimate, recompute: str | None, rows: int) -> Iterator[tuple[str, ParallelSpec, str | None]]:
    """Yield possible changes, cheapest first."""
    spec = found.spec
    finer: list[tuple[str, ParallelSpec]] = []
    if found.pipeline is not None and spec.pipeline is not None:
        now = found.pipeline.simulation.schedule.microbatches
        for count in (now * 2**power for power in range(1, 12)):
            if count <= rows and rows % count == 0:
                changed = replace(spec, pipeline=replace(spec.pipeline, microbatches=count))
                finer.append((f"pipeline.microbatches={count}", changed))
    for words, changed in finer:
        yield words, changed, recompute
    if recompute is None:
        yield "recompute='blocks' (--recompute blocks)", spec, "blocks"
        for words, changed in finer:
            yield f"{words} and --recompute blocks", changed, "blocks"
    if spec.zero is None and found.pipeline is None:
        from meshfold.mesh.spec import ZeroSpec

        yield "zero=dict(stage=3)", replace(spec, zero=ZeroSpec.parse(dict(stage=3))), recompute
