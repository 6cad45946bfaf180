"""What a spec holds and moves, before anything runs: the engine itself, on the meta device in a world of fake ranks.

Nothing is computed from a formula that the real run does not follow: the model is built, split and stepped as in
training, on tensors without values; collectives are recorded as they would be handed to torch.distributed, and
matmuls counted as they are called. Seen from rank 0, whose blocks are never smaller than another's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from meshfold.engine.engine import Engine
from meshfold.engine.machines import Machine
from meshfold.engine.model_state import global_shape
from meshfold.engine.shares import Shares
from meshfold.mesh import Log, Mesh, ParallelSpec, SpecError, all_reduce, gradient_norm, record
from meshfold.mesh.process_group import start_fake
from meshfold.tensor_parallel import Report

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
        activations: what autograd keeps from forward for backward, at its largest, with flash attention.
    """

    parameters: int
    masters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of them, as if all were alive at once."""
        return self.parameters + self.masters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind over the same axes in one part of an optimizer step.

    Attributes:
        phase: forward, backward, loss, gradients (over data axes) or norm.
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

    Raises:
        SpecError: for all that the engine refuses, and for a batch that ``accumulate`` does not divide.
    """
    if batch_size % accumulate:
        raise SpecError(f"{accumulate} micro-steps do not divide the global batch of {batch_size} sequences")
    begin = time.perf_counter()
    with start_fake(spec.world_size), _WithoutValues() as stand_in:
        engine = Engine(build, parallel=spec, precision=precision, device="meta")
        parameters = list(engine.model.parameters())
        targets = list(engine._targets.values())
        rows = engine.shard_batch(
            torch.empty(batch_size // accumulate, seq_len, dtype=torch.int64, device="meta")
        )
        earlier, last = Log(), Log()
        flops = activations = 0
        for log, number in ((earlier, accumulate - 1), (last, 1)):
            if number:
                stand_in.attention_flops = 0
                with (
                    FlopCounterMode(display=False) as counter,
                    _saved(parameters) as saved,
                    record() as found,
                ):
                    _micro_step(engine, rows, found, last=log is last)
                log.entries = found.entries * number
                flops += number * (counter.get_total_flops() + stand_in.attention_flops)
                activations = max(activations, saved.bytes)
        report = engine.report
        local = sum(parameter.numel() for parameter in parameters)
        true = sum(_bytes(target) for target in targets)
        own = {id(target) for target in targets}
        memory = Memory(
            parameters=sum(map(_bytes, parameters)),
            masters=true - sum(_bytes(p) for p in parameters if id(p) in own),
            gradients=true,
            optimizer=true * STATES[optimizer],
            activations=activations,
        )
        return Estimate(
            spec=spec,
            world_size=spec.world_size,
            parameters=report.parameters if report is not None else local,
            local_parameters=local,
            tokens=batch_size * seq_len,
            memory=memory,
            traffic=tuple(_summary([*earlier.entries, *last.entries], engine._world.outer_axes)),
            flops=flops,
            shapes={
                name: global_shape(tensor, tensor) for name, tensor in engine._model_state.unique().items()
            },
            summary="" if report is None else _in_a_line(report),
            report="" if report is None else str(report),
            seconds=time.perf_counter() - begin,
        )


def times(found: Estimate, machine: Machine, precision: str) -> Times:
    """How long a step takes on a machine, at least."""
    mesh = Mesh(found.spec.axes, rank=0)
    spent = {"tensor": 0.0, "data": 0.0}
    for entry in found.traffic:
        seconds = entry.calls * machine.latency + entry.bytes / machine.slowest(mesh, entry.axes)
        spent["data" if entry.phase == "gradients" else "tensor"] += seconds
    return Times(compute=found.flops / machine.flops[precision], **spent)


def _micro_step(engine: Engine, rows: Any, log: Log, *, last: bool) -> None:
    """What ``train_step`` does, but for looking at values, which are not there."""
    engine._reducer.begin(first=True, last=last)
    engine.model.train()
    work = engine._prepare(rows)
    shares = Shares(work, engine._world, shifted=engine._shifted, places=False)
    with engine._randomness(shares):
        loss, share = engine._loss(work, shares), shares.weight()
        log.phase = "backward"
        (loss * share).backward()
    log.phase = "loss"
    all_reduce(loss.detach() * share, engine._world.data_group)
    if last:
        log.phase = "backward"
        engine._reducer.finish()
        log.phase = "norm"
        gradient_norm(engine._targets.values(), engine.mesh)


def _in_a_line(report: Report) -> str:
    """``mode 2d: 1 embedding, 4 column, ...``."""
    roles = Counter(placed.role for placed in report.placed)
    counts = ", ".join(f"{count} {role.replace('_', ' ')}" for role, count in roles.items())
    return f"mode {report.mode} places {counts}"


def _summary(entries: list[Any], outer: tuple[str, ...]) -> Iterator[Traffic]:
    """Equal collectives together, in the order in which the first of them came."""
    found: dict[tuple[str, str, tuple[str, ...], int], list[Any]] = {}
    for entry in entries:
        # Buckets are sent in the middle of backward; they alone go over the data axes there.
        phase = "gradients" if entry.phase == "backward" and set(entry.axes) <= set(outer) else entry.phase
        found.setdefault((phase, entry.kind, entry.axes, entry.group_size), []).append(entry.bytes)
    for (phase, kind, axes, ranks), sent in found.items():
        yield Traffic(phase=phase, kind=kind, axes=axes, ranks=ranks, calls=len(sent), bytes=round(sum(sent)))


@dataclass
class _Saved:
    """Bytes of the storages that autograd keeps."""

    bytes: int = 0


@contextmanager
def _saved(parameters: list[nn.Parameter]) -> Iterator[_Saved]:
    """Count what is saved for backward: each storage once, parameters left out."""
    seen = {parameter.untyped_storage()._cdata for parameter in parameters}
    kept: list[torch.UntypedStorage] = []  # an address must stay its own while others are counted
    found = _Saved()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            kept.append(storage)
            found.bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


class _Attention(torch.autograd.Function):
    """Attention without values that keeps what flash attention keeps: its inputs, its output, a number a row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``b n s d, b n' t d, b n' t e -> b n s e``"""
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the three inputs."""
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _WithoutValues(TorchFunctionMode):
    """Lets a model's code run on the meta device.

    ``scaled_dot_product_attention`` would keep all scores there; the one above takes its place. Code that looks
    whether something holds for all elements (a mask that masks nothing) is told yes, for any element no.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            return self._attention(named["query"], named["key"], named["value"])
        if func is Tensor.__bool__ and hasattr(args[0], "_holds"):
            return args[0]._holds
        found = func(*args, **(kwargs or {}))
        if (
            func in (torch.all, Tensor.all, torch.any, Tensor.any)
            and isinstance(found, Tensor)
            and found.is_meta
        ):
            found._holds = func in (torch.all, Tensor.all)  # type: ignore[attr-defined]
        return found

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Two matmuls forward, five backward (one of them the scores again): 2 operations an element of each.
        batch_and_heads = q.shape[:-2].numel()
        self.attention_flops += (
            2 * batch_and_heads * q.shape[-2] * k.shape[-2] * (4 * q.shape[-1] + 3 * v.shape[-1])
        )
        found: Tensor = _Attention.apply(q, k, v)
        return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
