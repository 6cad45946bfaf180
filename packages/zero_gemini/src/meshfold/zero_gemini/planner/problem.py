"""The minimisation problem of a plan: the weighted sum of every phase's largest row, under limits on memory rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshfold.zero_gemini.planner.memory import gpu_kinds, memory_table
from meshfold.zero_gemini.planner.options import (
    GPU_ONLY,
    HOST_RESIDENT,
    MODES,
    NONE,
    SPECULATIVE_STEP,
    SPLIT_STEP,
    SPLIT_STEP_ON_DEVICE,
    WITH_DISK,
    WITH_HOST,
    Choice,
    Floats,
    Table,
)
from meshfold.zero_gemini.planner.rates import Machine
from meshfold.zero_gemini.planner.seconds import Phase, seconds_table
from meshfold.zero_gemini.planner.workload import Limits, Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One strategy and one mode. Rows of ``memory``: GPU at every timestep, host, disk; ``limits`` has the same rows, in bytes.

    ``attention``: of layers that are the rest of one with attention, the place of the latter among the layers.
    """

    strategy: str
    mode: str
    time: Table
    phases: tuple[Phase, ...]
    memory: Table
    limits: Floats
    attention: Mapping[int, int]

    @property
    def options(self) -> tuple[int, ...]:
        """Options that a chunk has under this mode."""
        return MODES[self.mode]

    def value(self, rows: Floats) -> Floats:
        """Return the seconds that rows of ``time`` add up to: ``.. row -> ..``."""
        total: Floats = np.zeros(rows.shape[:-1])
        for phase in self.phases:
            total = total + phase.weight * rows[..., phase.start : phase.stop].max(-1)
        return total

    def seconds(self, choice: Choice) -> float:
        return float(self.value(self.time.at(choice)))

    def fits(self, choice: Choice) -> bool:
        return bool((self.memory.at(choice) <= self.limits).all())

    def for_bytes(self, what: str) -> Problem:
        """Return the same problem, with the peak bytes on the ``gpu`` or ``host`` as the unlimited objective."""
        timesteps = len(self.limits) - 2
        rows = slice(0, timesteps) if what == "gpu" else slice(timesteps, timesteps + 1)
        limits = self.limits.copy()
        limits[rows] = np.inf
        table = Table(
            names=self.memory.names[rows],
            base=self.memory.base[rows],
            chunk=self.memory.chunk[:, :, rows],
            layer=self.memory.layer[:, :, rows],
        )
        phase = Phase(name=what, weight=1.0, start=0, stop=len(table.names))
        return Problem(
            strategy=self.strategy,
            mode=self.mode,
            time=table,
            phases=(phase,),
            memory=self.memory,
            limits=limits,
            attention=self.attention,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A workload on a machine under limits, and the problems in it."""

    workload: Workload
    machine: Machine
    limits: Limits

    @cached_property
    def gpu(self) -> Floats:
        """Bytes of every chunk on the GPU; chunk option timestep."""
        kinds = list(gpu_kinds(self.workload).values())
        return sum(kinds[1:], start=kinds[0])

    @cached_property
    def bounds(self) -> Floats:
        """Limits in the order of the rows of memory: GPU at every timestep, host, disk. Bytes."""
        gpu, host, disk = self.limits.as_tuple()
        return np.array([gpu] * self.workload.timesteps + [host, disk], dtype=float)

    @cached_property
    def _seconds(self) -> dict[str, tuple[Table, tuple[Phase, ...]]]:
        return {}

    def strategies(self) -> tuple[str, ...]:
        """Strategies of the optimizer step that the workload and the machine allow."""
        found = self.workload.strategies
        if self.workload.steps_at_once:
            return (SPLIT_STEP,)
        if self.workload.shadow_copies is not None:
            return (SPECULATIVE_STEP,)
        if found is None:
            found = (SPLIT_STEP, SPECULATIVE_STEP) if self.workload.clipping else (NONE,)
        return (*found, SPLIT_STEP_ON_DEVICE) if SPLIT_STEP in found and self.machine.gpu_streaming else found

    def problem(self, strategy: str, mode: str) -> Problem:
        if strategy not in self._seconds:
            self._seconds[strategy] = seconds_table(self.workload, self.machine, strategy)
        time, phases = self._seconds[strategy]
        memory = memory_table(self.workload, strategy, mode, self.gpu, self.machine.streaming_bytes)
        return Problem(
            strategy=strategy,
            mode=mode,
            time=time,
            phases=phases,
            memory=memory,
            limits=self.bounds,
            attention=self.workload.attention_of(),
        )

    def problems(self) -> Iterator[Problem]:
        """Yield every strategy in every mode; with everything on the GPU all strategies are the same."""
        yield self.problem(self.strategies()[0], GPU_ONLY)
        for mode in (WITH_HOST, WITH_DISK) if self.limits.disk_bytes else (WITH_HOST,):
            for strategy in self.strategies():
                yield self.problem(strategy, mode)

    def leanest(self) -> Iterator[Problem]:
        """Yield the problems that decide whether any plan fits: every mode, with the strategy that needs least memory."""
        yield from (self.problem(p.strategy, p.mode) for p in self.problems() if p.strategy == self.strategies()[0])

    def mode_of(self, choice: Choice) -> str:
        """Return the cheapest mode that allows a choice."""
        highest = int(choice.chunks.max())
        return GPU_ONLY if highest < HOST_RESIDENT else WITH_HOST if highest < 3 else WITH_DISK
