"""An estimate: the bytes that a rank holds and sends, and the operations that it computes, in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from torch import Tensor

from meshfold.mesh import Entry, Mesh, ParallelSpec
from meshfold.planner.clock import Work, update_seconds
from meshfold.planner.machines import Machine
from meshfold.planner.optimizer_state import kept_bytes

if TYPE_CHECKING:
    from meshfold.planner.pipeline_estimate import PipelineEstimate
    from meshfold.zero_gemini.planner import Plan


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that rank 0 holds at the peak of a step.

    Attributes:
        parameters: in the precision that the model computes with; also in fp8, where weights are cast once a step.
        masters: separate master weights (bf16 and fp16).
        gradients: of the master weights, as far as they exist at the peak: none in the first forward.
        optimizer: the optimizer's state.
        activations: all else that is alive at the peak: tensors that autograd keeps for backward, with flash attention, and
            those that operators read and write.
        channels: memory that peers write to, for ``transport="push"`` and ``overlap="push"``.
        host: bytes of the host's memory, for all ranks there; only under ``zero``.
        disk: bytes of the host's disk, likewise.
    """

    parameters: int
    masters: int
    gradients: int
    optimizer: int
    activations: int
    channels: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device at the peak."""
        return self.parameters + self.masters + self.gradients + self.optimizer + self.activations + self.channels

    def update_bytes(self, *, clip: bool) -> int:
        """Return the bytes that a step of the optimizer reads and writes, with all gradients on the device, without ``zero``.

        It reads gradients (with ``clip`` once more, for their norm) and reads and writes weights and moments. If compute has
        another precision, it also writes the weights in that precision.
        """
        weights = self.gradients  # as wide as the weights that are updated
        return (
            (2 if clip else 1) * self.gradients
            + 2 * weights
            + 2 * self.optimizer
            + (self.masters > 0) * self.parameters
        )

    @classmethod
    def without_zero(
        cls, parameters: Sequence[Tensor], masters: Sequence[Tensor], optimizer: str, activations: int = 0
    ) -> Memory:
        """Return the memory of a rank with unsharded weights, all gradients and optimizer state, as before the optimizer's step.

        Args:
            parameters: of the model on this rank.
            masters: the master weights; a parameter in the master precision is its own.
            optimizer: a key of :data:`meshfold.planner.optimizer_state.MOMENTS`.
            activations: bytes of them.
        """
        own = {id(master) for master in masters}
        size = sum(master.nbytes for master in masters)
        return cls(
            parameters=sum(parameter.nbytes for parameter in parameters),
            masters=size - sum(parameter.nbytes for parameter in parameters if id(parameter) in own),
            gradients=size,
            optimizer=kept_bytes(optimizer, masters),
            activations=activations,
        )


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """An optimizer step of a rank, under a spec without stages; fields as in :class:`Estimate`.

    Attributes:
        entries: its collectives, in bytes.
    """

    entries: list[Entry]
    work: Work
    memory: Memory
    update_bytes: int = 0
    plan: Plan | None = None
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind over the same axes in one part of an optimizer step.

    Attributes:
        phase: forward, backward, loss, norm; weights, sums of weights' gradients over tensor axes; over data axes gradients and,
            under ``zero``, parameters.
        kind: the collective.
        axes: mesh axes.
        ranks: number that take part.
        calls: per step.
        bytes: that rank 0 sends per step.
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
        traffic: bytes it sends, by kind.
        work: operators that rank 0 runs per step, without those of the optimizer.
        update_bytes: that the optimizer's step on rank 0 reads and writes; 0 under ``zero``, whose plan has its seconds.
        updated: trainable parameters on rank 0.
        shapes: name to global shape, of every tensor in a checkpoint.
        summary: what tensor parallelism did, in a line; empty without it.
        report: the same in full.
        seconds: duration of the measurement.
        plan: under ``zero``, the placement and the time of a step; None without, or if it does not fit.
        refusal: why it does not fit; empty if it does.
        pipeline: of a spec with one: every stage and rank, and the simulated schedule. Values for rank 0 are then those of
            the pipeline rank that holds most.
        fp8: which linear layers multiply in fp8, and why others do not; empty where none was asked to.
    """

    spec: ParallelSpec
    world_size: int
    parameters: int
    local_parameters: int
    tokens: int
    memory: Memory
    traffic: tuple[Traffic, ...]
    work: Work
    update_bytes: int
    updated: int
    shapes: dict[str, tuple[int, ...]]
    summary: str
    report: str
    seconds: float
    plan: Plan | None = None
    refusal: str = ""
    pipeline: PipelineEstimate | None = None
    fp8: str = ""

    @property
    def flops(self) -> int:
        """Floating-point operations of matmuls and attention on rank 0, per step, recomputation included."""
        return self.work.flop

    @property
    def moved(self) -> int:
        """Bytes that rank 0 sends a step."""
        return sum(entry.bytes for entry in self.traffic)

    @property
    def critical(self) -> int:
        """Bytes of activations and their gradients, which the next matmul waits for; part of :attr:`moved`."""
        return sum(entry.bytes for entry in self.traffic if entry.phase in ("forward", "backward"))

    @property
    def hideable(self) -> int:
        """Bytes that no matmul of the same layer waits for: gradients of weights, and prefetched parameters."""
        return sum(entry.bytes for entry in self.traffic if entry.phase in ("weights", "gradients", "parameters"))


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of an optimizer step by purpose.

    Attributes:
        compute: operators of forwards and backwards, one after the other, as the host launches them.
        tensor: traffic of activations and their gradients, which the next operator waits for.
        data: traffic of gradients and parameters, which may run beside both.
        optimizer: the step of the optimizer on the device; under ``zero``, whose plan has it, no more than launches on a CPU.
        busy: compute and traffic of ``tensor`` together: they overlap while the device waits for the host. None: they do not.
        host: launches of all operators, of the optimizer's step too; 0 on a CPU, whose other seconds have them.
        hidden: share of data traffic that compute hides while both run.
        late: of data traffic, what travels when no compute is left: gradients of a pipeline's stage that ends last, and parameters
            that ``zero`` gathers after the optimizer's step.
        idle: of the device in forward and backward, for want of launches; part of ``busy``. A plan of ``zero`` knows none. On a CPU
            the seconds of hooks under ``zero``.
    """

    compute: float
    tensor: float
    data: float
    optimizer: float = 0.0
    busy: float | None = None
    host: float = 0.0
    hidden: float = 1.0
    late: float = 0.0
    idle: float = 0.0

    @property
    def apart(self) -> float:
        """Seconds without overlap of messages, and no less than the host's."""
        return max(self.compute + self.tensor + self.data + self.optimizer, self.host)

    @property
    def waits_for_host(self) -> bool:
        """True if the device is faster than the host that launches its operators."""
        return self.host >= self.overlapped > 0

    @property
    def overlapped(self) -> float:
        """Seconds with gradient traffic overlapped with the rest of forward and backward, and no less than the host's."""
        return self.beside(self._busy)

    def beside(self, busy: float) -> float:
        """Return the same with other seconds for compute and what it waits for, such as a schedule's."""
        return max(max(busy, self.data - self.late) + self.exposed + self.late + self.optimizer, self.host)

    @property
    def exposed(self) -> float:
        """Seconds of data traffic that compute does not hide although both run."""
        return (1.0 - self.hidden) * min(self._busy, self.data - self.late)

    @property
    def _busy(self) -> float:
        return self.compute + self.tensor if self.busy is None else self.busy


@dataclass(frozen=True, kw_only=True)
class StepSpeed:
    """Planned speed of a spec on a machine.

    Attributes:
        seconds: of an optimizer step.
        tokens_per_second: of all ranks together.
        mfu: model FLOP utilisation: the FLOP of a rank's matmuls and attention, without recomputation, by what the data sheet
            allows in that time; of a pipeline the mean of its ranks, whose stages may differ.
    """

    seconds: float
    tokens_per_second: float
    mfu: float


def step_speed(found: Estimate, machine: Machine, precision: str) -> StepSpeed:
    """Return how fast a spec trains: the seconds of a step, by which specs are compared."""
    times = step_times(found, machine, precision)
    if found.pipeline is not None:
        seconds = times.beside(found.pipeline.seconds)
    else:
        seconds = (
            times.overlapped
            if found.plan is None
            else max(found.plan.seconds + times.idle + times.exposed + times.late, times.host)
        )
    own = found.work.flop - found.work.repeated_flop if found.pipeline is None else found.pipeline.flop
    return StepSpeed(
        seconds=seconds,
        tokens_per_second=found.tokens / seconds if seconds else 0.0,
        mfu=own / (seconds * machine.peak(precision)) if seconds else 0.0,
    )


def step_times(found: Estimate, machine: Machine, precision: str) -> Times:
    """Return the seconds that a step takes on a machine, by purpose."""
    mesh = Mesh(found.spec.axes, rank=0)
    spent, late = {"forward": 0.0, "backward": 0.0, "data": 0.0}, 0.0
    beside, shown = 0.0, 0.0  # seconds of data traffic beside compute, and what is not hidden of them
    shares = _late_shares(found)
    for entry in found.traffic:
        rate = machine.slowest(mesh, entry.axes, entry.kind)
        seconds = machine.message_seconds(entry.kind, entry.bytes, rate, calls=entry.calls, ranks=entry.ranks)
        hidden = entry.phase in ("weights", "gradients", "parameters")
        spent["data" if hidden else "backward" if entry.phase == "backward" else "forward"] += seconds
        late += seconds * shares.get(entry.phase, 0.0)
        if hidden:
            part = seconds * (1.0 - shares.get(entry.phase, 0.0))
            beside, shown = beside + part, shown + machine.shown_seconds(entry.kind, part, rate)
    phases = found.work.phases(machine, precision)
    waits = spent["forward"], spent["backward"]
    waiting = phases.waiting(*waits)
    update, launched = update_seconds(found.update_bytes, found.updated, machine)
    return Times(
        compute=phases.seconds,
        tensor=sum(waits),
        data=spent["data"],
        optimizer=update,
        busy=waiting.seconds,
        host=phases.host + launched,
        hidden=1.0 if _is_pushed(found.spec) or not beside else 1.0 - shown / beside,
        late=late,
        idle=found.work.units * machine.launches.unit if machine.kind == "cpu" else waiting.idle,
    )


def _late_shares(found: Estimate) -> dict[str, float]:
    """Return the share of a rank's traffic that travels when no compute is left, by phase.

    Without ``zero``, a pipeline's gradients: a stage's are complete with its last micro-batch, and the first rank ends last, with
    one of its stages. Under ``zero``, parameters of stages 1 and 2: they are gathered once all chunks are stepped.
    """
    if found.spec.zero is not None:
        return {"parameters": 1.0} if found.spec.zero.stage < 3 else {}
    if found.pipeline is None or found.spec.pipeline is None:
        return {}
    return {"gradients": found.spec.pipeline.size / len(found.pipeline.stages)}


def _is_pushed(spec: ParallelSpec) -> bool:
    """Return True if copy engines carry chunks: matmuls then run undisturbed."""
    return spec.zero is not None and spec.zero.transport == "push"


def summarize_traffic(entries: list[Entry], outer: tuple[str, ...]) -> Iterator[Traffic]:
    """Yield equal collectives as one, in order of their first calls; ``outer`` are the data axes."""
    found: dict[tuple[str, str, tuple[str, ...], int], list[Fraction]] = {}
    for entry in entries:
        # Buckets are sent during backward; only they are summed there over the data axes, or over a factor of these.
        bucket = entry.kind == "all_reduce" and any(axis.split("/")[0].split("%")[0] in outer for axis in entry.axes)
        phase = entry.phase
        if bucket and (phase == "backward" or entry.of_weights):
            phase = "gradients"
        elif entry.of_weights:
            phase = "weights"
        found.setdefault((phase, entry.kind, entry.axes, entry.group_size), []).append(entry.bytes)
    for (phase, kind, axes, ranks), sent in found.items():
        yield Traffic(phase=phase, kind=kind, axes=axes, ranks=ranks, calls=len(sent), bytes=round(sum(sent)))
