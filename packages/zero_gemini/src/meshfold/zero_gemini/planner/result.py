"""A plan: the placement for a whole step, bytes at every timestep, and the time of a step with its causes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfold.zero_gemini.planner.memory import device_steps_halves, has_shadow_copy
from meshfold.zero_gemini.planner.options import (
    ALL_GPU,
    DISK_RESIDENT,
    DISK_STREAMED,
    HOST_RESIDENT,
    HOST_STREAMED,
    PARAMETERS,
    STATE,
    Choice,
    Floats,
    Ints,
)
from meshfold.zero_gemini.planner.problem import Case, Problem
from meshfold.zero_gemini.planner.rates import Machine
from meshfold.zero_gemini.planner.seconds import TAIL
from meshfold.zero_gemini.planner.workload import Limits, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """Placement of one chunk between its uses."""

    name: str
    state: str
    """``gpu``, ``host``, ``disk``, or ``none`` for a frozen chunk: also the device that steps it (disk: the CPU)."""
    parameters: str
    """``gpu``: resident. ``host``: streamed to the GPU for every use."""
    gradients: str
    """``gpu`` or ``host``: held there until the global norm is known. ``ring``: on its way to the CPU's step.
    ``step``: used up by the GPU's step at once. ``none``: frozen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """Choice for one layer, or for the results of attention in one: its activations are kept or recomputed."""

    name: str
    kept: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One sum of seconds in one phase of the step; the phase takes as long as its largest, plus its exposed tail."""

    phase: str
    name: str
    seconds: float
    binds: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Result of :func:`meshfold.zero_gemini.planner.policies.plan`. ``print(plan)`` is a table."""

    workload: Workload
    machine: Machine
    limits: Limits
    """bytes, all filled in"""
    policy: str
    """``auto`` or the placement policy it was made by"""
    strategy: str
    """how it clips: a key of ``STRATEGIES``"""
    chunks: tuple[ChunkPlan, ...]
    layers: tuple[LayerPlan, ...]
    seconds: float
    """predicted seconds a step"""
    phases: tuple[tuple[str, float, float], ...]
    """(name, share of steps, seconds) of every phase"""
    terms: tuple[Term, ...]
    gpu_bytes: tuple[int, ...]
    """predicted at every timestep"""
    host_bytes: tuple[int, ...]
    disk_bytes: tuple[int, ...]
    proved: bool
    """every other plan was ruled out as slower"""

    @property
    def peak_gpu_bytes(self) -> int:
        """The most bytes on the GPU at any timestep."""
        return max(self.gpu_bytes)

    @property
    def peak_host_bytes(self) -> int:
        """The most bytes on the host at any timestep."""
        return max(self.host_bytes)

    @property
    def peak_disk_bytes(self) -> int:
        """The most bytes on disk at any timestep."""
        return max(self.disk_bytes)

    @property
    def host_elems(self) -> int:
        """Elements whose optimizer state lives in the host's memory."""
        pairs = zip(self.workload.chunks, self.chunks, strict=True)
        return sum(chunk.elems for chunk, made in pairs if made.state == "host")

    @property
    def copied_fraction(self) -> float:
        """Fraction of :attr:`host_elems` whose optimizer state has a shadow copy; 0 where none are on the host."""
        return self.copied_elems / max(1, self.host_elems)

    @property
    def copied_elems(self) -> int:
        """Elements whose optimizer state has a shadow copy in the host's memory."""
        copied: list[bool] = has_shadow_copy(self.workload, self.strategy)[:, HOST_STREAMED].tolist()
        pairs = zip(self.workload.chunks, self.chunks, copied, strict=True)
        return sum(chunk.elems for chunk, made, has_copy in pairs if has_copy and made.state == "host")

    @property
    def device_steps_halves(self) -> bool:
        """True if GPU streaming writes only the parameters of chunks without a shadow copy, and the cores write all moments."""
        return device_steps_halves(self.workload, self.strategy)

    @property
    def binding(self) -> tuple[str, ...]:
        """The term that decides how long each phase takes, as ``phase: term``."""
        return tuple(f"{term.phase}: {term.name}" for term in self.terms if term.binds)

    @property
    def tail_seconds(self) -> float:
        """Seconds by which the step is longer than its busiest resource: optimizer steps that nothing hides."""
        weights = {name: weight for name, weight, _ in self.phases}
        return sum(weights[term.phase] * term.seconds for term in self.terms if term.name == "exposed tail")

    def __str__(self) -> str:
        from meshfold.zero_gemini.planner.table import table

        return table(self)


def options_of(plan: Plan) -> Choice:
    """Return the choice that a plan was made from."""
    codes = {("gpu", "gpu"): ALL_GPU, ("none", "gpu"): ALL_GPU, ("none", "host"): HOST_STREAMED}
    codes |= {("host", "gpu"): HOST_RESIDENT, ("host", "host"): HOST_STREAMED}
    codes |= {("disk", "gpu"): DISK_RESIDENT, ("disk", "host"): DISK_STREAMED}
    chunks = np.array([codes[chunk.state, chunk.parameters] for chunk in plan.chunks])
    return Choice(chunks=chunks, layers=np.array([int(layer.kept) for layer in plan.layers], dtype=np.int64))


def canonical(workload: Workload, choice: Choice) -> Choice:
    """Return the choice with frozen chunks, which have no state, on the GPU or streamed; never streamed without stage 3.

    What is kept of a layer without the results of its attention is not kept.
    """
    resident: Ints = choice.chunks
    if workload.stage < 3:
        resident = np.array([ALL_GPU, HOST_RESIDENT, HOST_RESIDENT, DISK_RESIDENT, DISK_RESIDENT])[choice.chunks]
    frozen = np.array([not chunk.trainable for chunk in workload.chunks])
    streamed = np.isin(resident, [HOST_STREAMED, DISK_STREAMED])
    chunks: Ints = np.where(frozen, np.where(streamed, HOST_STREAMED, ALL_GPU), resident)
    layers: Ints = choice.layers.copy()
    for rest, attention in workload.attention_of().items():
        layers[rest] &= layers[attention]
    return Choice(chunks=chunks, layers=layers)


def problem_of(case: Case, strategy: str, choice: Choice) -> Problem:
    """Return the problem with the lowest cost for a choice."""
    return case.problem(strategy, case.mode_of(choice))


def build(case: Case, strategy: str, choice: Choice, *, policy: str, proved: bool = False) -> Plan:
    """Return the plan of a choice: its bytes and seconds. Limits are not checked here."""
    workload = case.workload
    choice = canonical(workload, choice)
    problem = problem_of(case, strategy, choice)
    memory = [int(value) for value in problem.memory.at(choice)]
    rows = problem.time.at(choice)
    terms, phases = _terms(problem, rows)
    return Plan(
        workload=workload,
        machine=case.machine,
        limits=case.limits,
        policy=policy,
        strategy=strategy,
        chunks=tuple(
            ChunkPlan(
                name=chunk.name,
                state=STATE[option] if chunk.trainable else "none",
                parameters=PARAMETERS[option],
                gradients=_gradients(workload, STATE[option]) if chunk.trainable else "none",
            )
            for chunk, option in zip(workload.chunks, choice.chunks.tolist(), strict=True)
        ),
        layers=tuple(
            LayerPlan(name=layer.name, kept=bool(kept))
            for layer, kept in zip(workload.layers, choice.layers.tolist(), strict=True)
        ),
        seconds=float(problem.value(rows)),
        phases=phases,
        terms=terms,
        gpu_bytes=tuple(memory[:-2]),
        host_bytes=(memory[-2],) * workload.timesteps,
        disk_bytes=(memory[-1],) * workload.timesteps,
        proved=proved,
    )


def recost(made: Plan, workload: Workload, machine: Machine) -> Plan:
    """Return the same choice with the bytes and seconds of another workload and machine.

    Args:
        made: the plan.
        workload: of as many chunks and layers.
        machine: with other rates.
    """
    case = Case(workload=workload, machine=machine, limits=made.limits)
    return build(case, made.strategy, options_of(made), policy=made.policy)


def _gradients(workload: Workload, state: str) -> str:
    if workload.clipping:
        return "gpu" if state == "gpu" else "host"
    return "step" if state == "gpu" else "ring"


def _terms(problem: Problem, values: Floats) -> tuple[tuple[Term, ...], tuple[tuple[str, float, float], ...]]:
    terms: list[Term] = []
    phases: list[tuple[str, float, float]] = []
    for phase in problem.phases:
        part = range(phase.start, phase.stop)
        busy = {problem.time.names[i]: float(values[i]) for i in part if not problem.time.names[i].startswith(TAIL)}
        total = float(values[phase.start : phase.stop].max())
        exposed = total - max(busy.values())
        hidden = exposed <= 1e-12 * total
        busiest = max(busy, key=lambda name: busy[name])
        terms += [Term(phase=phase.name, name=n, seconds=s, binds=hidden and n == busiest) for n, s in busy.items()]
        terms.append(Term(phase=phase.name, name="exposed tail", seconds=0.0 if hidden else exposed, binds=not hidden))
        phases.append((phase.name, phase.weight, total))
    return tuple(terms), tuple(phases)
