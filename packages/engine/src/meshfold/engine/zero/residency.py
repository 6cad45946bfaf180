"""Placement of a model's state, planned: the first steps are traced, then chunks move to where a step is fastest.

With ``recompute="auto"`` the same plan says which blocks keep their activations.

Two optimizer steps are traced; the first also pays for one-time work of the process. The trace and this machine's rates are
the planner's input. The plan is carried out between two steps, by moving chunks and by a switch at every block. No bit of the
training changes. :class:`Phase` lists the phases.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from enum import Enum
from statistics import median

import torch
from torch import nn

from meshfold.engine.model.recompute import RecomputedBlocks
from meshfold.engine.world import PIPE, World
from meshfold.engine.zero.measured_plans import InFlight, MeasuredPlans, expecting_alike
from meshfold.engine.zero.memory import (
    Pressure,
    describe_shortage,
    is_out_of_memory,
    largest_output,
    shortage_remedy,
)
from meshfold.engine.zero.process_settings import limit_allocator
from meshfold.engine.zero.stage_refusals import Refused, refusal_of_stages
from meshfold.engine.zero.watching import Measured, Watcher, typical_timings
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.spec import ZeroSpec
from meshfold.zero_gemini import (
    Chunk,
    ChunkPlacement,
    DiskError,
    Gemini,
    MemoryPlanError,
    MemoryTier,
    OutOfBudget,
    carry_out,
    check_transition,
)
from meshfold.zero_gemini.machine_rates import (
    ALLOCATOR_MARGIN,
    CORRECTED_AFTER,
    TRACED_STEPS,
    UNLIMITED_BYTES,
    WORTH_MOVING,
    resident_bytes,
)
from meshfold.zero_gemini.optimizer import StepKind, StepTiming
from meshfold.zero_gemini.planner import SPLIT_STEP, Plan, Regime

STEADY = 16
"""Steps in a row whose gradients count the same, before a plan that waits for the norm is made again without."""
SHRINK = 0.04
"""Fraction of the memory limit that is given up each time that memory runs short."""


class Phase(Enum):
    """Phase of the planning."""

    OFF = "off"
    """Nothing is planned: there is no choice, or no plan fits and all chunks that can have left the device."""
    TRACING = "tracing"
    """Steps are traced; no plan yet."""
    TRIAL = "trial"
    """The first steps under a plan are timed, and then the plan is corrected by them."""
    CORRECTED = "corrected"
    """The plan was corrected. It is made again once gradients have counted the same for long."""
    STEADY_TRIAL = "steady trial"
    """As ``TRIAL``, under a plan whose steps do not wait for the norm."""
    STEADY = "steady"
    """The plan stays, unless memory runs short."""


_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.OFF: frozenset(),
    Phase.TRACING: frozenset({Phase.OFF, Phase.TRIAL, Phase.STEADY}),  # OFF also if other code moves the chunks
    Phase.TRIAL: frozenset({Phase.CORRECTED}),
    Phase.CORRECTED: frozenset({Phase.STEADY_TRIAL, Phase.STEADY}),
    Phase.STEADY_TRIAL: frozenset({Phase.STEADY}),
    Phase.STEADY: frozenset(),
}
"""Legal transitions. A plan with ``placement`` other than ``"auto"`` is steady at once."""


class Residency:
    """Controller that traces steps, plans, and moves chunks.

    Attributes:
        phase: of the planning.
        plan: the plan that was made; None until then.
        moves: number of times that a plan was carried out, or room was made without one.
    """

    def __init__(
        self,
        model: nn.Module,
        gemini: Gemini,
        spec: ZeroSpec,
        world: World,
        *,
        regime: Regime,
        accumulation: int,
        blocks: RecomputedBlocks | None = None,
        recomputes: bool = False,
    ) -> None:
        """Args:
        model: the model that is trained.
        gemini: holds its state.
        spec: the entry ``zero``.
        world: its ranks and devices.
        regime: bytes an element takes.
        accumulation: micro-steps of an optimizer step.
        blocks: those whose activations the plan may keep; all recompute until there is one.
        recomputes: blocks recompute their activations already, so the plan has nothing to switch.
        """
        self._model, self._gemini, self._spec, self._world, self._blocks = model, gemini, spec, world, blocks
        self._plans = MeasuredPlans(model, gemini, spec, world, regime=regime, accumulation=accumulation)
        self._watcher = Watcher(model, gemini, world.device, blocks)
        self._pressure, self._recomputes = Pressure(world), recomputes
        self._allocator = limit_allocator(world.device, None)
        self._begun = 0.0
        self._took: list[float] = []  # seconds of the steps under the plan
        self._timings: list[
            Mapping[StepKind, StepTiming]
        ] = []  # of the host's optimizer, step by step from the third on
        self._peak_gpu = self._peak_host = 0
        self._shrunk = 0.0
        self._in_flight: InFlight | None = None
        self.plan: Plan | None = None
        self.moves = 0
        # On a CPU without a limit there is only one choice: which activations to keep.
        cuda, limited = world.device.type == "cuda", spec.gpu_memory_limit is not None or blocks is not None
        is_wanted = cuda or (limited and world.device.type != "meta")
        self.phase = Phase.TRACING if is_wanted else Phase.OFF

    def hand_over(self) -> None:
        """Plan nothing from now on: other code moves the chunks, between steps. Call it before the first step."""
        if self.phase is not Phase.OFF:
            self._to(Phase.OFF)

    def close(self) -> None:
        """Watch no more: a step that failed may have left it on, and compiled code of the whole process eager."""
        self._watcher.stop()
        self._allocator.close()

    def begin(self) -> None:
        """Prepare for a forward whose backward will follow."""
        self._watcher.stop()
        if not self._begun:
            self._begun = time.perf_counter()
            if self.plan is not None and self._world.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._world.device)
        if self._world.pipelined:
            return
        if self.is_watching:
            self._watcher.begin()
        elif self._is_timing:
            self._watcher.time()

    def turn(self) -> None:
        """Mark the end of a forward, before its backward."""
        self._watcher.turn()

    def _to(self, phase: Phase) -> None:
        check_transition("residency", _TRANSITIONS, self.phase, phase)
        self.phase = phase

    @property
    def _is_trial(self) -> bool:
        return self.phase is Phase.TRIAL or self.phase is Phase.STEADY_TRIAL

    @property
    def _is_timing(self) -> bool:
        """True if this step is timed for the plan."""
        return self._is_trial and self._is_representative

    @property
    def _is_representative(self) -> bool:
        """True after the plan's first two steps, which are not representative."""
        return len(self._took) >= 2

    @property
    def is_watching(self) -> bool:
        """True if the next step is traced for a plan."""
        return self.phase is Phase.TRACING

    def rehearse(self, rehearse: Callable[[], None], *, live: int, stages: int, microbatches: int) -> None:
        """Watch this rank's stages of a pipeline by themselves, before a step; all ranks of the pipeline must call.

        Args:
            rehearse: forward and backward of a micro-batch through the stages; gradients are dropped.
            live: pairs of stage and micro-batch that the rank holds at most in a step.
            stages: of the rank.
            microbatches: of the step.
        """
        self._in_flight = InFlight(live=live, stages=stages, microbatches=microbatches)
        self._watcher.begin()
        rehearse()
        self._watcher.end()

    def end(self) -> None:
        """Record the end of the backward."""
        self._watcher.end()

    def stepped(self) -> None:
        """Plan if enough steps were traced, or record the step's time. Call it after each optimizer step."""
        took, self._begun = time.perf_counter() - self._begun, 0.0
        if self.phase is Phase.OFF:
            return
        self._watcher.step_over()
        if self.phase is Phase.TRACING:
            if len(self._watcher.traces) >= TRACED_STEPS:
                self._decide()
            return
        device, auto = self._world.device, self._spec.placement == "auto"
        if self._is_representative:
            self._timings.append(self._watcher.timings)
        self._took.append(took)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        self._peak_gpu, self._peak_host = max(self._peak_gpu, peak), max(self._peak_host, resident_bytes())
        if auto and self._world.mesh.world_size > 1 and self._is_short(peak):
            self._shrink()
        elif self._is_trial and len(self._took) == CORRECTED_AFTER:
            self._correct()
        elif self.phase is Phase.CORRECTED and self._gemini.steps_alike >= STEADY:
            self._expect_alike()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on this rank's state on disk; the first rank's are warnings too."""
        return self._gemini.notes

    @property
    def measured(self) -> Measured | None:
        """Measurements of the plan; None until two steps were made under it: the first still follows a step before it."""
        if len(self._took) < 2:
            return None
        steps: dict[str, float] = {
            what: timing.elements / timing.seconds
            for what, timing in typical_timings(self._timings).items()
            if timing.seconds
        }
        return Measured(
            seconds=median(self._took[1:]), gpu_bytes=self._peak_gpu, host_bytes=self._peak_host, host_steps=steps
        )

    @property
    def is_settled(self) -> bool:
        """True if the plan will not be made again, unless memory runs short. Steps before may move chunks, which takes seconds."""
        return self.phase in (Phase.OFF, Phase.STEADY)

    def can_relieve(self, error: BaseException) -> bool:
        """Return True if a micro-step ran out of memory, and some can be freed.

        With several ranks one may have run out while the others wait for it: then the error is raised.
        """
        alone = self._world.mesh.world_size == 1 and self._spec.placement == "auto"
        keeps = self._kept() or (self._blocks is not None and self._blocks.with_attention)
        if isinstance(error, torch.OutOfMemoryError | OutOfBudget) and alone and (self._on_device() or keeps):
            return True
        if is_out_of_memory(error):
            self.describe(error)
        return False

    def describe(self, error: BaseException) -> None:
        """Say in a note, once, what did not fit and what to change, for an error that says that memory ran out."""
        found = describe_shortage(error, self._model, self._watcher.tokens)
        remedy = shortage_remedy(chunks_on_device=bool(self._on_device()), recomputes=self._recomputes)
        if not any(note.endswith(remedy) for note in getattr(error, "__notes__", ())):
            error.add_note(f"{found} {remedy}".strip())

    def relieve(self) -> None:
        """Free device memory: by a plan with a lower limit, or before the first plan by moving some chunks to the host."""
        self._watcher.stop()
        self._gemini.abandon()
        self._shrunk += SHRINK
        there, kept = self._on_device(), self._kept()
        if not self._replanned():
            self.moves += 1
            self._keep(())
            self._gemini.gather_by((), ())  # fewer units at once
            gone = there[-max(1, len(there) // 8) :]
            self._gemini.move({chunk: ChunkPlacement(parameters="host", state="host") for chunk in gone})
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()
        moved, fewer = max(0, len(there) - len(self._on_device())), len(kept) - len(self._kept())
        warnings.warn(
            f"The device ran out of memory; {moved} more of {len(self._gemini.chunks)} chunks are kept off it"
            f"{f', and {fewer} more blocks recompute,' if fewer > 0 else ''} from now on. Set a lower gpu_memory_limit to plan for "
            "this from the start.",
            stacklevel=4,
        )

    def _is_short(self, peak: int) -> bool:
        """Return True if a rank nearly ran out of memory in the last steps. All ranks must call."""
        plan = self.plan
        assert plan is not None  # steps are counted from the first plan
        most = plan.limits.gpu_bytes or UNLIMITED_BYTES
        return self._pressure.found(peak_bytes=peak, most_bytes=int(most * (1.0 + ALLOCATOR_MARGIN / 2)))

    def _shrink(self) -> None:
        """Plan with a lower limit on all ranks, before a step runs out of memory, which could not be undone."""
        self._shrunk += SHRINK
        if not self._replanned():
            self._pressure.forget()
        elif self._world.mesh.rank == 0:
            warnings.warn(
                "A rank nearly ran out of device memory: placements were planned again on all ranks, with less. Set a lower "
                "gpu_memory_limit to plan for this from the start.",
                stacklevel=6,
            )

    def _replanned(self) -> bool:
        """Carry out a plan with a lower limit. Return False if there was no plan or none fits."""
        if self.plan is None:
            return False
        try:
            self._carry_out(self._plans.plan(self.plan.workload, self.plan.machine, shrunk=self._shrunk))
        except MemoryPlanError:
            return False
        return True

    def _kept(self) -> tuple[str, ...]:
        """Return the blocks that keep their activations."""
        return () if self._blocks is None else self._blocks.kept

    def _keep(self, names: Collection[str]) -> None:
        if self._blocks is not None:
            self._blocks.keep(names)

    def _on_device(self) -> list[Chunk]:
        movable = self._spec.stage == 3
        return [
            chunk
            for chunk, placement in self._gemini.placements.items()
            if placement.state == "device" or (movable and placement.parameters == "device")
        ]

    # -- deciding -----------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        workload, machine = self._plans.problem(self._watcher, self._in_flight)
        workload = replace(workload, recomputed=self._recomputes, **largest_output(self._model, self._watcher.tokens))
        plan, refusal = None, None
        try:
            plan = self._plans.plan(workload, machine, shrunk=self._shrunk)
        except MemoryPlanError as error:
            refusal = error
        self._raise_on_all_stages(refusal)
        if plan is not None:
            self._to(Phase.TRIAL if self._spec.placement == "auto" else Phase.STEADY)
            self._carry_out(plan)
        elif refusal is not None:
            self._make_do(refusal)

    def _raise_on_all_stages(self, refusal: MemoryPlanError | None) -> None:
        """Raise the refusals of a pipeline's stages on all of them, with the least that is enough for all. All ranks must call."""
        world = self._world
        if not world.pipelined or self._can_make_do:
            return
        mine = None if refusal is None else asdict(Refused.of(refusal, world.mesh.index(PIPE)))
        refused = [one for one in all_gather_object(mine, world.everyone, world.device) if one is not None]
        if refused:
            raise refusal_of_stages([Refused(**one) for one in refused]) from refusal

    def _carry_out(self, plan: Plan) -> None:
        """Move chunks to the plan's placements and set which blocks keep their activations."""
        self.plan = plan
        self.moves += 1
        self._keep([layer.name for layer in plan.layers if layer.kept])
        self._pressure.forget()
        self._took.clear()
        self._watcher.times.clear()
        self._timings.clear()
        self._peak_gpu = self._peak_host = 0
        carry_out(self._gemini, plan, moves=self._spec.placement == "auto")  # other policies have placed the chunks
        before, self._allocator = self._allocator, limit_allocator(self._world.device, self._plans.allocator_bytes)
        before.close()

    def _correct(self) -> None:
        """Plan again with rates measured in the plan's first steps. Chunks move only if that is faster."""
        self._to(Phase.CORRECTED if self.phase is Phase.TRIAL else Phase.STEADY)
        plan = self.plan
        assert plan is not None  # steps are counted from the first plan
        timings = typical_timings(self._timings)
        seen = self._plans.seen(plan, peak=self._peak_gpu, timings=timings, compute=self._watcher.compute)
        if (seen.workload, seen.machine) == (plan.workload, plan.machine):
            return
        self.plan = seen
        found = self._plans.plan(seen.workload, seen.machine, shrunk=self._shrunk)
        if found.seconds < WORTH_MOVING * seen.seconds:
            self._carry_out(found)

    def _expect_alike(self) -> None:
        """Plan again with speculative steps: the gradient factor has been stable for long."""
        plan, found = self.plan, None
        assert plan is not None  # steps are counted from the first plan
        if plan.workload.strategies == (SPLIT_STEP,) and not self._world.pipelined:
            found = self._plans.plan(expecting_alike(plan.workload), plan.machine, shrunk=self._shrunk)
        if found is None or found.seconds >= WORTH_MOVING * plan.seconds:
            self._to(Phase.STEADY)
            return
        self._to(Phase.STEADY_TRIAL)  # measure the rates of speculative steps
        self._carry_out(found)

    @property
    def _can_make_do(self) -> bool:
        return self._world.device.type == "cuda" and self._spec.placement == "auto"

    def _make_do(self, error: MemoryPlanError) -> None:
        """Move all chunks off the device, since no plan fits: plans keep a reserve, so the step may still fit."""
        if not self._can_make_do:
            raise error
        self._to(Phase.OFF)
        self.moves += 1
        away: MemoryTier = "host" if self._spec.offload_path is None else "disk"
        try:
            self._gemini.move({chunk: ChunkPlacement(parameters="host", state=away) for chunk in self._gemini.chunks})
        except DiskError as full:
            full.add_note(f"Everything movable had to leave the device and the host, because no plan fits: {error}")
            raise
        torch.cuda.empty_cache()
        if self._world.mesh.rank == 0:
            warnings.warn(f"{error} Everything movable is now off the device.", stacklevel=6)
