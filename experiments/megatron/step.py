"""The time of a training step: a layer on the clock, its collectives, the pipeline's schedule, gradients, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from experiments.megatron.layer import HALF, Shape, backward, core_forward, forward, head
from meshfold.pipeline import schedule, simulate
from meshfold.planner import Machine
from meshfold.planner.clock import Work, optimizer_seconds

PRECISION = "fp16"
STATE_BYTES = 34  # that Adam with float32 masters reads and writes for a half-precision parameter


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model and how it is trained.

    Attributes:
        layers, hidden, heads: of the model.
        vocabulary: padded.
        sequence: tokens.
        batch: sequences of a step.
        rows: of a micro-batch.
        gpus: all of them.
        tensor, pipeline: ranks of each.
        chunks: of a rank's layers, in an interleaved schedule.
        recompute: ``"full"``: all layers in backward; ``"selective"``: attention between its projections; ``"none"``.
        sequence_parallel, flash, window, parallel_block: see :class:`Shape`.
        hidden_traffic: what runs beside the layers: ``"tensor"``, ``"pipeline"``, ``"data"``.
        sharded: by ZeRO's stage 3, which gathers parameters twice a micro-batch; without tensor and pipeline parallelism.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 51_200
    sequence: int = 2048
    batch: int
    rows: int = 1
    gpus: int
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    recompute: str = "full"
    sequence_parallel: bool = False
    flash: bool = False
    sharded: bool = False
    window: int = 0
    parallel_block: bool = False
    hidden_traffic: frozenset[str] = frozenset()

    @property
    def data(self) -> int:
        """Ranks that hold different samples."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def microbatches(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.batch // (self.data * self.rows)

    @property
    def parameters(self) -> float:
        """SC'21, equation 2."""
        h = self.hidden
        return (
            12 * self.layers * h**2 * (1 + 13 / (12 * h) + (self.vocabulary + self.sequence) / (12 * self.layers * h))
        )

    @property
    def shape(self) -> Shape:
        """A layer."""
        return Shape(
            hidden=self.hidden,
            heads=self.heads,
            sequence=self.sequence,
            rows=self.rows,
            tensor=self.tensor,
            sequence_parallel=self.sequence_parallel,
            flash=self.flash,
            window=self.window,
            parallel_block=self.parallel_block,
        )

    def flop(self, *, recomputed: bool) -> float:
        """Operations of a step: SC'21, equation 3, with full recomputation; three quarters of it without."""
        h, s = self.hidden, self.sequence
        share = 1 + s / (6 * h) + self.vocabulary / (16 * self.layers * h)
        if not recomputed:
            share = 1 + s / (6 * h) + self.vocabulary / (12 * self.layers * h)
        return (96 if recomputed else 72) * self.batch * s * self.layers * h**2 * share


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of a step by what they are for.

    Attributes:
        pipeline: micro-batches through the schedule.
        gradients: their sum over the data ranks, after it.
        optimizer: its step.
    """

    pipeline: float
    gradients: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """All of them, one after the other."""
        return self.pipeline + self.gradients + self.optimizer


def layer_seconds(run: Run, machine: Machine) -> tuple[float, float]:
    """Forward and backward of a layer for a micro-batch, with its collectives; recomputation belongs to backward."""
    shape = run.shape
    ahead, back = forward(shape), backward(shape)
    sums = shape.norms * _collective(machine, HALF * shape.stream, run.tensor, machine.inside)
    if "tensor" in run.hidden_traffic:
        sums = 0.0
    again = {
        "full": ahead.seconds(machine, PRECISION) + sums,
        "selective": sum((Work(operators={one: 1}) for one in core_forward(shape)), Work()).seconds(machine, PRECISION),
        "none": 0.0,
    }[run.recompute]
    return ahead.seconds(machine, PRECISION) + sums, back.seconds(machine, PRECISION) + sums + again


def step_of(run: Run, machine: Machine) -> Step:
    """The time of a step. Messages between stages are sent after an action and before the next (not beside it)."""
    first, second = layer_seconds(run, machine)
    per_stage = run.layers / run.pipeline
    last = head(run.shape, run.vocabulary).seconds(machine, PRECISION)
    sent = HALF * run.shape.stream / run.tensor / machine.between + machine.latency if run.pipeline > 1 else 0.0
    # The head is on the last stage; the others wait for it, once a micro-batch.
    messages = 0.0 if "pipeline" in run.hidden_traffic else run.chunks * sent
    ahead = first * per_stage + last / 3 + messages
    back = second * per_stage + last * 2 / 3 + messages
    units = _makespan(run.pipeline, run.microbatches, run.chunks, round(back / ahead, 2))
    parameters = run.parameters / (run.tensor * run.pipeline)
    if (
        run.sharded
    ):  # parameters are gathered forward and backward, gradients scattered, beside the layers; a rank has its own link
        share = (run.data - 1) / run.data * HALF * run.parameters / machine.between
        return Step(
            pipeline=run.microbatches * max(first * run.layers + second * run.layers + last, 3 * share),
            gradients=0.0,
            optimizer=optimizer_seconds(int(STATE_BYTES * run.parameters / run.data), machine),
        )
    gradients = _collective(machine, HALF * parameters, run.data, _rate(machine, run))
    if "data" in run.hidden_traffic:  # but the last chunk's
        gradients /= run.chunks
    return Step(
        pipeline=units * ahead,
        gradients=gradients,
        optimizer=optimizer_seconds(int(STATE_BYTES * parameters), machine),
    )


def _collective(machine: Machine, block: float, ranks: int, rate: float) -> float:
    """Seconds of an all-reduce."""
    return machine.latency + 2 * (ranks - 1) / ranks * block / rate if ranks > 1 else 0.0


def _rate(machine: Machine, run: Run) -> float:
    """Bytes a second of a rank in a group of data ranks: one that has several ranks of a node uses as many of its links."""
    here = max(machine.devices // run.tensor, 1)
    return machine.inside if run.data <= here else min(here * machine.between, machine.inside)


@cache
def _makespan(ranks: int, microbatches: int, chunks: int, back: float) -> float:
    """The time of a schedule in forward times of a rank: simulated, or the closed form where it is long."""
    if ranks == 1:
        return microbatches * (1 + back)
    if ranks * microbatches * chunks > LONGEST:
        return (microbatches + (ranks - 1) / chunks) * (1 + back)
    made = (
        schedule("1f1b", ranks=ranks, microbatches=microbatches)
        if chunks == 1
        else schedule("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
    )
    times = [1 / chunks] * (ranks * chunks)
    halves = [back / chunks / 2] * (ranks * chunks)
    return float(simulate(made, times, halves, halves).makespan)


LONGEST = 2000
"""Actions of a schedule that are simulated."""
