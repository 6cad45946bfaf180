"""Automatic placement of a model's chunks in a training loop of one's own: trace two steps, plan, move, correct.

:mod:`meshfold.engine` does the same for its train step, and adds what only it knows: pipelines, recomputed blocks, a retry of
steps that ran out of memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from statistics import median

import torch
from torch import nn

from meshfold.mesh import Mesh, SpecError
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.model_io import LiveBytes
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.gemini import Gemini
from meshfold.zero_gemini.machine_rates import (
    ALLOCATOR_MARGIN,
    CORRECTED_AFTER,
    TRACED_STEPS,
    WORTH_MOVING,
    available_device_bytes,
    measure_step,
    observed_under,
    ranks_per_host,
    slowest,
)
from meshfold.zero_gemini.memory.arena import MemoryTier
from meshfold.zero_gemini.optimizer import StateSize, StepKind, StepTiming, state_size
from meshfold.zero_gemini.planner import (
    SPECULATIVE_STEP,
    Limits,
    Machine,
    Plan,
    Regime,
    Workload,
    automatic,
    recost,
)
from meshfold.zero_gemini.profiler import (
    CudaBytes,
    CudaClock,
    StepTracer,
    Trace,
    WallClock,
    peak_of,
    workload_of,
)

_TIERS: dict[str, MemoryTier] = {"gpu": "device", "host": "host", "disk": "disk", "none": "host"}


def carry_out(gemini: Gemini, plan: Plan, *, moves: bool = True) -> None:
    """Move chunks to a plan's placements, and let steps stream on the GPU or be speculative as the plan says.

    All ranks must call, between two steps, with the same plan. The training keeps its bits.

    Args:
        gemini: holds the model that the plan is of; the plan's chunks are named by their numbers.
        plan: the plan.
        moves: False: other code has placed the chunks.
    """
    chunks, workload = gemini.chunks, plan.workload
    gemini.stream_on_gpu(False)
    gemini.step_speculatively(False)
    if moves:
        gemini.move(
            {
                chunks[int(one.name)]: ChunkPlacement(parameters=_TIERS[one.parameters], state=_TIERS[one.state])
                for one in plan.chunks
            }
        )
    gemini.gather_by(() if workload.ready is None else workload.units, workload.ready or ())
    streams = plan.machine.gpu_streaming > 0 and any(one.state == "host" for one in plan.chunks)
    gemini.stream_on_gpu(streams, halves=plan.device_steps_halves)
    copied = [chunks[int(one.name)] for one in plan.chunks[: workload.shadow_copies]]  # None: all
    gemini.step_speculatively(plan.strategy == SPECULATIVE_STEP, chunks=copied)
    limit, device = plan.limits.gpu_bytes, gemini.memory.device
    if device.type == "cpu" and limit is not None:  # nothing else enforces the limit
        gemini.memory.compute.budget_bytes = limit - min(workload.non_model_bytes)
    if device.type == "cuda":
        torch.cuda.empty_cache()


class AutoPlacement:
    """Chooses the placement of a model's chunks from its first steps::

        auto = AutoPlacement(model, gemini, mesh, limits=Limits(gpu_bytes=24 * GiB))
        for batch in batches:
            with auto.watching():
                gemini.begin(last=True)
                loss_of(model(batch)).backward()
            gemini.clip(1.0)
            gemini.step()
            auto.stepped()

    Losses are the same as without it, bit for bit. All ranks must make the same calls.

    Attributes:
        plan: the plan in effect; None before the first.
        moves: number of times that a plan was carried out.
    """

    def __init__(
        self,
        model: nn.Module,
        gemini: Gemini,
        mesh: Mesh,
        *,
        limits: Limits | None = None,
        regime: str = "A",
        accumulation: int = 1,
        tokens: int = 1,
        disk: str | None = None,
    ) -> None:
        """Args:
            model: the model that is trained, not compiled yet: traced steps run operator by operator.
            gemini: holds it.
            mesh: its ranks.
            limits: bytes that a rank's device, a host and its disk may be filled to; None: all that the machine has, without disk.
            regime: how Adam keeps its state, ``"A"``, ``"B"`` or ``"C"``; float32 and float16 models have their own.
            accumulation: micro-steps of an optimizer step.
            tokens: of a rank in a step, for the tables.
            disk: folder of the optimizer state on disk, as given to ``Gemini``.

        Raises:
            SpecError: for an unknown regime.
        """
        if regime not in ("A", "B", "C"):
            raise SpecError(f"regime={regime!r}: write 'A', 'B' or 'C'")
        self._model, self._gemini, self._accumulation, self._tokens = model, gemini, accumulation, tokens
        self._everyone, self._device = mesh.group(*mesh.names), gemini.memory.device
        self._limits, self._disk = limits or Limits(), disk
        self._data_ranks = max(chunk.group.size for chunk in gemini.chunks)
        chunk = gemini.chunks[0]
        master_dtype, kept = gemini.master_dtype(chunk.parameters[0]), StateSize()
        if gemini.optimizer is not None:
            kept = state_size(gemini.optimizer, chunk.dtype, master_dtype)
        self._regime = Regime.of(
            regime,
            chunk.dtype,
            master_dtype,
            accumulation=accumulation,
            ranks=self._data_ranks,
            **kept._asdict(),
        )
        self._traces: list[Trace] = []
        self._traced = False  # in this optimizer step
        self._began = 0.0
        self._took: list[float] = []
        self.plan: Plan | None = None
        self.moves = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager around a micro-step's forward and backward. Before the plan, the first of each step is traced."""
        self._began = self._began or time.perf_counter()
        if self.plan is not None or self._traced:
            yield
            return
        clock = CudaClock(self._device) if self._device.type == "cuda" else WallClock()
        memory = LiveBytes()
        if self._device.type == "cuda":
            memory = CudaBytes(self._device, model_bytes=peak_of(self._gemini.memory.compute))  # type: ignore[assignment]
        with ExitStack() as stack:
            tracer = StepTracer(self._model, memory=memory, clock=clock)
            stack.enter_context(self._gemini.memory.waiting.watched(tracer.waiting))
            stack.enter_context(tracer)
            yield
        self._traces.append(tracer.trace())
        self._traced = True

    def stepped(self) -> None:
        """Plan once two steps were traced, and correct the plan by its first steps. Call it after each optimizer step.

        Raises:
            MemoryPlanError: if no placement is within the limits; it names the smallest limit that would work.
        """
        took, self._began, self._traced = time.perf_counter() - self._began, 0.0, False
        timings = self._gemini.take_step_timings()
        if self.plan is None:
            if len(self._traces) >= TRACED_STEPS:
                self._carry_out(automatic(*self._problem(timings), self._within))
            return
        self._took.append(took)
        if len(self._took) == CORRECTED_AFTER and self.moves == 1:
            seen = self._agreed(observed_under(self.plan, timings))
            known = recost(self.plan, self.plan.workload, seen)
            found = automatic(known.workload, seen, self._within)
            self.plan = known
            if found.seconds < WORTH_MOVING * known.seconds:
                self._carry_out(found)

    @property
    def seconds(self) -> float | None:
        """The median seconds of a step under the plan; None until there were three."""
        return median(self._took[2:]) if len(self._took) > 2 else None

    @property
    def _within(self) -> Limits:
        limits = self._limits
        if self._disk is None and limits.disk_bytes is None:
            limits = replace(limits, disk_bytes=0)
        if self._device.type == "cuda" and limits.gpu_bytes is None:
            limits = replace(limits, gpu_bytes=int(available_device_bytes(self._device) * (1.0 - ALLOCATOR_MARGIN)))
        return limits

    def _carry_out(self, plan: Plan) -> None:
        self.plan, self.moves = plan, self.moves + 1
        self._took.clear()
        carry_out(self._gemini, plan)

    def _agreed(self, machine: Machine) -> Machine:
        return slowest(machine, all_gather_object(asdict(machine), self._everyone, self._device))

    def _problem(self, timings: Mapping[StepKind, StepTiming]) -> tuple[Workload, Machine]:
        """Return the workload and the machine's rates, the same on all ranks."""
        measured = measure_step(
            self._traces,
            self._gemini.memory,
            regime=self._regime,
            everyone=self._everyone,
            planning=self._everyone,
            disk=self._disk,
            timings=timings,
        )
        workload = workload_of(
            measured.trace,
            self._gemini.uses(),
            name=type(self._model).__name__,
            regime=self._regime,
            tokens=self._tokens,
            stage=self._gemini.stage,
            accumulation=self._accumulation,
            data_ranks=self._data_ranks,
            ranks_per_host=ranks_per_host(self._everyone.size),
            host_base_bytes=measured.host_base_bytes,
            clipping=self._gemini.holds_gradients,
        )
        return workload, measured.machine
