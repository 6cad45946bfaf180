"""What a spec holds and moves, before anything runs: the engine itself, on the meta device in a world of fake ranks.

Nothing is computed from a formula that the real run does not follow: the model is built, split and stepped as in
training, on tensors without values; collectives are recorded as they would be handed to torch.distributed, and
matmuls counted as they are called. Seen from rank 0, whose blocks are never smaller than another's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshfold.engine.batches.shares import Shares
from meshfold.engine.engine import Engine
from meshfold.engine.planning.machines import MACHINES, Machine
from meshfold.engine.planning.without_values import WithoutValues, saved_for_backward
from meshfold.engine.recompute import check
from meshfold.engine.sequence import counted_attention
from meshfold.engine.states import PlainStates
from meshfold.mesh import Entry, Log, Mesh, ParallelSpec, SpecError, all_reduce, record
from meshfold.mesh.process_group import start_fake
from meshfold.tensor_parallel import Report

if TYPE_CHECKING:
    from meshfold.engine.planning.pipeline_estimate import PipelineEstimate
    from meshfold.engine.zero.plan import ZeroEstimate
    from meshfold.zero_gemini.planner import Plan

# Bytes of optimizer state for a true weight of 4 bytes (8 in fp64 are twice that).
STATES = {"adamw": 2, "adam": 2, "sgd": 0}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that rank 0 holds.

    Attributes:
        parameters: in the precision that the model computes with.
        masters: true weights beside them (bf16 and fp16).
        gradients: of the true weights.
        optimizer: the optimizer's state.
        activations: what autograd keeps from forward for backward, at its largest, with flash attention; under ``zero``
            whatever else is alive at the fullest moment.
        host: bytes of the host's memory, of all ranks there; only ``zero`` puts something there.
        disk: the same of its disk.
    """

    parameters: int
    masters: int
    gradients: int
    optimizer: int
    activations: int
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """All that is on the device, as if all were alive at once; under ``zero`` it is, at the fullest moment."""
        return self.parameters + self.masters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind over the same axes in one part of an optimizer step.

    Attributes:
        phase: forward, backward, loss, norm; over data axes gradients and, under ``zero``, parameters.
        kind: the collective.
        axes: mesh axes.
        ranks: how many take part.
        calls: how many a step.
        bytes: bytes that rank 0 sends a step.
    """

    phase: str
    kind: str
    axes: tuple[str, ...]
    ranks: int
    calls: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A spec and a model, measured without running.

    Attributes:
        spec: the spec.
        world_size: ranks.
        parameters: of the whole model.
        local_parameters: on rank 0, padding included.
        tokens: in the global batch of one optimizer step.
        memory: what rank 0 holds.
        traffic: what it moves, each kind apart.
        flops: floating point operations of matmuls and attention that rank 0 carries out, a step.
        shapes: name to global shape, of every tensor that a checkpoint has.
        summary: what tensor parallelism did, in a line; empty without it.
        report: the same in full.
        seconds: how long the measurement took.
        plan: under ``zero``, where everything lives and what a step takes; None without, or if it does not fit.
        refusal: why it does not fit; empty if it does.
        pipeline: of a spec with one: every stage and rank, and the schedule on a clock. Then what is said of rank 0 here is of
            the rank of the pipeline that holds most.
    """

    spec: ParallelSpec
    world_size: int
    parameters: int
    local_parameters: int
    tokens: int
    memory: Memory
    traffic: tuple[Traffic, ...]
    flops: int
    shapes: dict[str, tuple[int, ...]]
    summary: str
    report: str
    seconds: float
    plan: Plan | None = None
    refusal: str = ""
    pipeline: PipelineEstimate | None = None

    @property
    def moved(self) -> int:
        """Bytes that rank 0 sends a step."""
        return sum(entry.bytes for entry in self.traffic)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of an optimizer step at least: computing and moving at full rate, nothing else."""

    compute: float
    tensor: float
    data: float

    @property
    def apart(self) -> float:
        """One after the other."""
        return self.compute + self.tensor + self.data

    @property
    def overlapped(self) -> float:
        """With the gradients' traffic hidden behind the rest, as far as it goes."""
        return max(self.compute + self.tensor, self.data)


def estimate(
    build: Callable[[], nn.Module],
    spec: ParallelSpec,
    *,
    batch_size: int,
    seq_len: int,
    precision: str = "fp32",
    optimizer: str = "adamw",
    accumulate: int = 1,
    rules: Mapping[str, str] | None = None,
    recompute: str | None = None,
    clip: bool = True,
    machine: Machine | None = None,
    name: str = "model",
) -> Estimate:
    """Measure a causal language model under a spec.

    Args:
        build: makes the model in the plain way; it is never allocated.
        spec: with its world size; no process may be running.
        batch_size: sequences of a global batch.
        seq_len: tokens of a sequence.
        precision: as the engine takes it.
        optimizer: adamw, adam or sgd.
        accumulate: micro-steps of an optimizer step.
        rules: as the engine takes them.
        recompute: the same.
        clip: whether gradients are clipped by their norm, for which all of them are held.
        machine: what ``zero`` plans for; nodes of H200s by default.
        name: of the model, for people.

    Raises:
        SpecError: for all that the engine refuses, and for a batch that ``accumulate`` does not divide.
    """
    if batch_size % accumulate:
        raise SpecError(f"{accumulate} micro-steps do not divide the global batch of {batch_size} sequences")
    recompute = check(recompute, spec)
    if spec.pipeline is not None and spec.pipeline.size > 1:
        from meshfold.engine.planning.pipeline_estimate import estimate_pipeline

        asked: dict[str, Any] = dict(
            batch_size=batch_size, seq_len=seq_len, precision=precision, optimizer=optimizer, accumulate=accumulate, rules=rules,
            recompute=recompute, machine=machine or MACHINES["h200x8"], name=name,
        )  # fmt: skip
        alone = replace(spec, pipeline=None, zero=None)
        without = {**asked, "recompute": None if recompute is None else "blocks"}
        return estimate_pipeline(build, spec, estimate(build, alone, **without), **asked)
    begin = time.perf_counter()
    with (
        start_fake(spec.world_size),
        WithoutValues() as stand_in,
        counted_attention(spec, stand_in.add_attention),
    ):
        plain = replace(spec, zero=None)  # chunks are laid out from the shapes of what they would hold
        engine = Engine(
            build,
            parallel=plain,
            precision=precision,
            device="meta",
            rules=rules,
            recompute=None if recompute is None else "blocks",
            clip_grad_norm=1.0 if clip else None,
        )
        rows = engine.shard_batch(
            torch.empty(batch_size // accumulate, seq_len, dtype=torch.int64, device="meta")
        )
        zero: ZeroEstimate | None = None
        if spec.zero is None:
            entries, flops, memory = _plain_steps(engine, rows, accumulate, stand_in, optimizer)
        else:
            from meshfold.engine.zero.plan import estimate_zero

            engine._states.close()  # chunks take gradients up as they come
            zero = estimate_zero(
                engine,
                spec.zero,
                lambda log: _forward_backward(engine, rows, log, nullcontext()),
                stand_in,
                machine=machine or MACHINES["h200x8"],
                tokens=batch_size * seq_len // engine._world.data_size,
                accumulation=accumulate,
                moments=STATES[optimizer],
                name=name,
                blocks=engine._blocks if recompute == "auto" else None,
            )
            entries, flops, memory = zero.entries, zero.flops, zero.memory
        report = engine.report
        local = sum(parameter.numel() for parameter in engine.model.parameters())
        return Estimate(
            spec=spec,
            world_size=spec.world_size,
            parameters=report.parameters if report is not None else local,
            local_parameters=local,
            tokens=batch_size * seq_len,
            memory=memory,
            traffic=tuple(summarised(entries, engine._world.outer_axes)),
            flops=flops,
            shapes={name: source.shape for name, source in engine._model_state.sources().items()},
            summary="" if report is None else _in_a_line(report),
            report="" if report is None else str(report),
            seconds=time.perf_counter() - begin,
            plan=None if zero is None else zero.plan,
            refusal="" if zero is None else zero.refusal,
        )


def _plain_steps(
    engine: Engine, rows: Any, accumulate: int, stand_in: WithoutValues, optimizer: str
) -> tuple[list[Entry], int, Memory]:
    """Collectives and operations of an optimizer step without ``zero``, and what is held."""
    states = engine._states
    assert isinstance(states, PlainStates)  # without zero
    parameters = list(engine.model.parameters())
    targets = list(states.targets.values())
    earlier, last = Log(), Log()
    flops = activations = 0
    for log, number in ((earlier, accumulate - 1), (last, 1)):
        if number:
            stand_in.attention_flops = 0
            with (
                FlopCounterMode(display=False) as counter,
                saved_for_backward(parameters) as saved,
                record() as found,
            ):
                _micro_step(engine, rows, found, last=log is last)
            log.entries = found.entries * number
            flops += number * (counter.get_total_flops() + stand_in.attention_flops)
            activations = max(activations, saved.bytes)
    true = sum(map(tensor_bytes, targets))
    own = {id(target) for target in targets}
    memory = Memory(
        parameters=sum(map(tensor_bytes, parameters)),
        masters=true - sum(tensor_bytes(p) for p in parameters if id(p) in own),
        gradients=true,
        optimizer=true * STATES[optimizer],
        activations=activations,
    )
    return [*earlier.entries, *last.entries], flops, memory


def times(found: Estimate, machine: Machine, precision: str) -> Times:
    """How long a step takes on a machine, at least."""
    mesh = Mesh(found.spec.axes, rank=0)
    spent = {"tensor": 0.0, "data": 0.0}
    for entry in found.traffic:
        seconds = entry.calls * machine.latency + entry.bytes / machine.slowest(mesh, entry.axes)
        spent["data" if entry.phase in ("gradients", "parameters") else "tensor"] += seconds
    return Times(compute=found.flops / machine.flops[precision], **spent)


def _micro_step(engine: Engine, rows: Any, log: Log, *, last: bool) -> None:
    """What ``train_step`` does, but for looking at values, which are not there."""
    engine._states.begin(first=True)
    _forward_backward(engine, rows, log, engine._states.backward("last" if last else "more"))
    if last:
        log.phase = "backward"
        engine._states.finish(1.0)
        log.phase = "norm"
        engine._states.norm()


def _forward_backward(engine: Engine, rows: Any, log: Log, around: AbstractContextManager[None]) -> None:
    """A micro-step's collectives, into the log; ``around`` its backward."""
    engine.model.train()
    work = engine._prepare(rows)
    shares = Shares(work, engine._world, shifted=engine._shifted, places=False)
    with engine._randomness(shares):
        loss, share = engine._loss(work, shares), shares.weight()
        log.phase = "backward"
        with around:
            (loss * share).backward()
    log.phase = "loss"
    all_reduce(loss.detach() * share, engine._world.data_group)


def _in_a_line(report: Report) -> str:
    """``mode 2d: 1 embedding, 4 column, ...``."""
    roles = Counter(placed.role for placed in report.placed)
    counts = ", ".join(f"{count} {role.replace('_', ' ')}" for role, count in roles.items())
    return f"mode {report.mode} places {counts}"


def summarised(entries: list[Entry], outer: tuple[str, ...]) -> Iterator[Traffic]:
    """Equal collectives together, in the order in which the first of them came; ``outer`` are the data axes."""
    found: dict[tuple[str, str, tuple[str, ...], int], list[Fraction]] = {}
    for entry in entries:
        # Buckets are sent in the middle of backward; they alone are summed over the data axes there.
        bucket = entry.kind == "all_reduce" and set(entry.axes) <= set(outer)
        phase = "gradients" if entry.phase == "backward" and bucket else entry.phase
        found.setdefault((phase, entry.kind, entry.axes, entry.group_size), []).append(entry.bytes)
    for (phase, kind, axes, ranks), sent in found.items():
        yield Traffic(phase=phase, kind=kind, axes=axes, ranks=ranks, calls=len(sent), bytes=round(sum(sent)))


def tensor_bytes(tensor: Tensor) -> int:
    """Of its elements."""
    return tensor.numel() * tensor.element_size()
