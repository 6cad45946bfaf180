"""Plans of the placement of a model's state, from profiles of its steps and measurements of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from torch import nn

from meshfold.engine.world import World
from meshfold.engine.zero.device_limit import DeviceLimit, outside_bytes
from meshfold.engine.zero.memory import free_host_bytes
from meshfold.engine.zero.plan import fitting, plan_for
from meshfold.engine.zero.watching import Watcher
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.spec import ZeroSpec
from meshfold.zero_gemini import Gemini
from meshfold.zero_gemini.machine_rates import (
    ALLOCATOR_MARGIN,
    UNLIMITED_BYTES,
    measure_step,
    observed_under,
    ranks_per_host,
    slowest,
)
from meshfold.zero_gemini.optimizer import SPECULATE_AFTER_STEPS, StepKind, StepTiming
from meshfold.zero_gemini.planner import (
    SPECULATIVE_STEP,
    SPLIT_STEP,
    DoesNotFit,
    Limits,
    Machine,
    Plan,
    Regime,
    Workload,
    evaluate_placement,
    recost,
    timed,
)
from meshfold.zero_gemini.profiler import PhaseSeconds, Trace, workload_of

_KINDS = {"device": "gpu", "host": "host", "disk": "disk"}


class MeasuredPlans:
    """Builder and solver of the planner's problem.

    Attributes:
        allocator_bytes: of ``gpu_memory_limit``, what is left to the allocator by the last plan; None where there is no such limit.
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
    ) -> None:
        """Args:
        model: the trained model.
        gemini: holds it.
        spec: the entry ``zero``.
        world: where it lies.
        regime: bytes an element takes.
        accumulation: micro-steps of an optimizer step.
        """
        self._model, self._gemini, self._spec, self._world = model, gemini, spec, world
        self._regime, self._accumulation = regime, accumulation
        self.allocator_bytes: int | None = None

    def problem(self, watcher: Watcher, flying: InFlight | None) -> tuple[Workload, Machine]:
        """Return a step's workload and this machine's rates, the same on all ranks of a stage, which must all call.

        Args:
            watcher: has traces of some steps.
            flying: the pipeline's stages and micro-batches in flight; None without a pipeline.
        """
        spec, world = self._spec, self._world
        # All ranks of a stage must make the same plan, so plan for the worst of them.
        measured = measure_step(
            watcher.traces,
            self._gemini.memory,
            regime=self._regime,
            everyone=world.everyone,
            planning=world.stage_group,
            disk=spec.offload_path,
            host=self._wants_host,
            timings=watcher.timings,
        )
        microbatches = 1 if flying is None else flying.microbatches
        workload = workload_of(
            measured.trace,
            self._gemini.uses(),
            name=type(self._model).__name__,
            regime=self._regime,
            tokens=watcher.tokens * microbatches,
            stage=spec.stage,
            accumulation=self._accumulation * microbatches,
            data_ranks=world.data_size,
            ranks_per_host=ranks_per_host(world.mesh.world_size),
            reshards=spec.reshard_after_forward,
            host_base_bytes=measured.host_base_bytes,
            clipping=flying is not None or self._gemini.holds_gradients,
            whole_gradients=flying is not None and world.data_size > 1,
        )
        if flying is not None:
            workload = workload_in_flight(workload, measured.trace, flying)
        elif self._gemini.holds_gradients and self._gemini.steps_alike >= SPECULATE_AFTER_STEPS:
            workload = expecting_alike(workload)
        return workload, measured.machine

    def seen(
        self,
        made: Plan,
        *,
        peak: int,
        timings: Mapping[StepKind, StepTiming],
        compute: PhaseSeconds | None,
    ) -> Plan:
        """Return a plan with the seconds and bytes that its first steps showed. Nothing moves.

        A trace has the peak of model data and the peak of other data at each timestep, but not whether both occurred at once.
        Memory that the step did not use is available to chunks. No step before a plan uses GPU streaming. Collective over the
        ranks of a stage; all return the same.

        Args:
            made: the plan.
            peak: peak device bytes of its steps; 0 where they are not counted.
            timings: of the host's steps under it.
            compute: of one micro-step under it; None: as planned with. The slowest rank's counts.
        """
        machine = observed_under(made, timings)
        mine = None if compute is None else [compute.forward, compute.backward]
        told = all_gather_object([peak, asdict(machine), mine], self._world.stage_group, self._world.device)
        most, workload = max(most for most, _, _ in told), made.workload
        spare = made.peak_gpu_bytes - most
        if most and spare > ALLOCATOR_MARGIN * made.peak_gpu_bytes:
            less = tuple(max(0, value - spare) for value in workload.non_model_bytes)
            workload = replace(workload, non_model_bytes=less)
        spent = [seconds for _, _, seconds in told if seconds is not None]
        if spent:
            forward, backward = (max(seconds) for seconds in zip(*spent, strict=True))
            kept = [layer.name for layer in made.layers if layer.kept]
            if compute is not None and compute.parts and len(told) == 1 and workload.timestep_seconds is not None:
                workload = timed(workload, compute.parts, kept=kept)
            else:
                workload = workload.taking(forward=forward, backward=backward, kept=kept)
        return recost(made, workload, slowest(machine, [entry for _, entry, _ in told]))

    def _room_for_copies(self, made: Plan) -> int | None:
        """Return the bytes that a host has for shadow copies of its chunks, which are optional; None: a user's limit decides.

        As much memory again must stay free: for copies of a checkpoint that is written in the background, and for other processes.
        All ranks of a stage must call.
        """
        if self._spec.host_memory_limit is not None:
            return None
        if made.machine.host_bytes < UNLIMITED_BYTES:
            return (made.machine.host_bytes - made.peak_host_bytes + self._bytes_of_copies(made)) // 2
        free: list[int] = all_gather_object(free_host_bytes(), self._world.stage_group, self._world.device)
        return min(free) // 2

    def _bytes_of_copies(self, made: Plan) -> int:
        """Return the bytes that shadow copies take of a host under a plan."""
        regime = self._regime
        return int((regime.parameter + regime.state) * made.copied_elems * made.workload.ranks_per_host)

    def _outside_bytes(self) -> int:
        """Return :func:`outside_bytes` of the rank with the most. All ranks of a stage must call."""
        device = self._world.device
        mine = outside_bytes(device)
        return mine if device.type != "cuda" else max(all_gather_object(mine, self._world.stage_group, device))

    @property
    def _wants_host(self) -> bool:
        """Return True if anything is on the host, or may move there."""
        placements = self._gemini.placements.values()
        away = any(placement.parameters != "device" or placement.state != "device" for placement in placements)
        return away or self._spec.placement == "auto"

    def plan(self, workload: Workload, machine: Machine, *, shrunk: float) -> Plan:
        """Return the plan that the spec's placement asks for, within its limits and what the machine has.

        ``shrunk``: share of the device's limit that is left free in addition to the margin.

        Raises:
            MemoryPlanError: if there is none. If ``gpu_memory_limit`` decides, ``minimum_gpu_bytes`` is the least that it may be.
        """
        spec, limit, is_limited = self._spec, DeviceLimit(bytes=machine.gpu_bytes, shrunk=shrunk), False
        if spec.gpu_memory_limit is not None:
            asked = DeviceLimit(bytes=spec.gpu_memory_limit, outside=self._outside_bytes(), shrunk=shrunk)
            is_limited = asked.allocator_bytes < machine.gpu_bytes
            if is_limited:
                limit, self.allocator_bytes = asked, asked.allocator_bytes
        limits = Limits(
            gpu_bytes=limit.plan_bytes if limit.allocator_bytes < UNLIMITED_BYTES else None,
            host_bytes=spec.host_memory_limit,
            disk_bytes=None if spec.offload_path is not None else 0,
        )
        try:
            found = self._plan(workload, machine, limits)
        except DoesNotFit as error:
            if not is_limited:
                raise
            raise limit.explained(error) from None
        if found.strategy != SPECULATIVE_STEP:
            return found
        room = self._room_for_copies(found)
        if room is None or self._bytes_of_copies(found) <= room:
            return found
        without = self._plan(replace(workload, strategies=(SPLIT_STEP,)), machine, limits)
        fewer = self._plan(workload, machine, replace(limits, host_bytes=without.peak_host_bytes + max(0, room)))
        return fewer if self._bytes_of_copies(fewer) <= room else without

    def _plan(self, workload: Workload, machine: Machine, limits: Limits) -> Plan:
        spec = self._spec
        if spec.placement == "auto":
            return plan_for(spec, workload, machine, limits)
        placements = {str(i): placement for i, placement in enumerate(self._gemini.placements.values())}
        named = {
            name: (_KINDS[placement.parameters], _KINDS[placement.state]) for name, placement in placements.items()
        }
        return fitting(
            lambda rates: evaluate_placement(workload, rates, limits, placements=named, policy=spec.placement), machine
        )


def expecting_alike(workload: Workload) -> Workload:
    """Return the same for steps whose gradient factor is expected to stay the same, so that they may be speculative."""
    return replace(workload, strategies=(SPLIT_STEP, SPECULATIVE_STEP), clip_probability=0.0)


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Micro-batches that a schedule lets a rank hold.

    Attributes:
        live: pairs of stage and micro-batch, at most.
        stages: of the rank.
        microbatches: of a micro-step.
    """

    live: int
    stages: int
    microbatches: int


def workload_in_flight(one: Workload, trace: Trace, flying: InFlight) -> Workload:
    """Return the workload of a pipeline's rank, which holds the activations of several micro-batches.

    The rank runs forward and backward of each micro-batch like an accumulation of as many micro-steps. It also holds gradients of
    whole chunks, which are summed over the data axes once a step.

    Args:
        one: the workload as if one micro-batch was held at a time, with a micro-step for each and ``whole_gradients`` over ranks.
        trace: of F of its stages on one micro-batch, in order, and of their backwards.
        flying: stages and micro-batches that the schedule holds at once.
    """
    at_once = -(-flying.live // flying.stages)  # micro-batches in flight; the trace counted one
    last, end = trace.timesteps[trace.forward_timesteps - 1], trace.timesteps[-1]
    others = (at_once - 1) * max(0, last.left_bytes - end.left_bytes)
    return replace(
        one,
        in_order=False,
        non_model_bytes=tuple(value + others for value in one.non_model_bytes),
        layers=tuple(replace(layer, kept_bytes=layer.kept_bytes * at_once) for layer in one.layers),
    )
