"""Where a model's state lives, planned: the first steps are watched, then chunks move to where a step is fastest.

Two optimizer steps are watched, the first of which also pays for what a process does once. What was seen, with the
rates of this machine, gives the planner its problem; the plan is carried out by moving chunks between two steps, which
changes no bit of the training.
"""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshfold.engine.world import World
from meshfold.engine.zero_plan import plan_for
from meshfold.mesh.spec import ZeroSpec
from meshfold.zero_gemini import Gemini, Home, MemoryPlanError, OutOfBudget
from meshfold.zero_gemini.agree import tell_all
from meshfold.zero_gemini.chunk import Chunk
from meshfold.zero_gemini.measuring import UNLIMITED, device_bytes, measure
from meshfold.zero_gemini.memory import Place
from meshfold.zero_gemini.planner import Limits, Machine, Plan, Regime, Workload
from meshfold.zero_gemini.planner.policies import placed
from meshfold.zero_gemini.trace import (
    CudaBytes,
    CudaClock,
    LiveBytes,
    StepTracer,
    Trace,
    TracedMoment,
    WallClock,
    peak_of,
    workload_of,
)

WATCHED_STEPS = 2
MARGIN = 0.03
"""Share of the device's limit that is left to the allocator's gaps."""
SHRINK = 0.04
"""How much more of it, each time that was too little."""
CONTEXT_BYTES = 600 * 2**20
"""What CUDA and its libraries take of a device besides what the allocator counts."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What came of a plan.

    Attributes:
        seconds: of an optimizer step, from its first micro-step to its end: the median.
        gpu_bytes: most that tensors took on the device at once, gathered chunks and activations included; 0 on a CPU.
        host_bytes: most that the process had of the host's memory at the end of a step.
    """

    seconds: float
    gpu_bytes: int
    host_bytes: int


class Residency:
    """Watches, plans, and moves.

    Attributes:
        plan: what was decided; None until it is.
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
        model: what is trained.
        gemini: holds it.
        spec: the entry ``zero``.
        world: where it lies.
        regime: bytes an element takes.
        accumulation: micro-steps of an optimizer step.
        """
        self._model, self._gemini, self._spec, self._world = model, gemini, spec, world
        self._regime, self._accumulation = regime, accumulation
        self._traces: list[Trace] = []
        self._traced = False  # in this optimizer step
        self._tokens = 0
        self._tracer: StepTracer | None = None
        self._watch = ExitStack()
        self._begun = 0.0
        self._took: list[float] = []  # seconds of the steps under the plan
        self._peak_gpu = self._peak_host = 0
        self._corrected, self._shrunk = False, 0.0
        self.plan: Plan | None = None
        # On a CPU without a limit there is nothing to decide.
        cuda, limited = world.device.type == "cuda", spec.gpu_memory_limit is not None
        self._wanted = cuda or (limited and world.device.type != "meta")
        if cuda and spec.gpu_memory_limit is not None:
            limit_allocator(world.device, spec.gpu_memory_limit)

    def begin(self) -> None:
        """Before a forward whose backward will follow."""
        self._let_go()
        if not self._begun:
            self._begun = time.perf_counter()
            if self._wanted and self.plan is not None and self._world.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._world.device)
        if not self._wanted or self._traced or self.plan is not None:
            return
        device = self._world.device
        if device.type == "cuda":
            model_bytes = peak_of(self._gemini.memory.compute)
            tracer = StepTracer(
                self._model, memory=CudaBytes(device, model_bytes=model_bytes), clock=CudaClock(device)
            )
        else:
            tracer = StepTracer(self._model, memory=LiveBytes(), clock=WallClock())
        handle = self._model.register_forward_pre_hook(self._count_tokens, with_kwargs=True)
        self._watch.callback(handle.remove)
        self._tracer = self._watch.enter_context(tracer)

    def end(self) -> None:
        """After the backward."""
        tracer = self._tracer
        self._let_go()
        if tracer is not None:
            self._traces.append(tracer.trace())
            self._traced = True

    def _let_go(self) -> None:
        """Stop watching."""
        self._tracer = None
        self._watch.close()

    def _count_tokens(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self._tokens = max([1, *(x.numel() for x in given if not x.is_floating_point())])

    def stepped(self) -> None:
        """After each optimizer step: plan if enough was seen, or note how long it took."""
        took, self._begun = time.perf_counter() - self._begun, 0.0
        if not self._wanted:
            return
        if self.plan is None:
            self._traced = False
            if len(self._traces) >= WATCHED_STEPS:
                self._decide()
            return
        device = self._world.device
        self._took.append(took)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        self._peak_gpu, self._peak_host = max(self._peak_gpu, peak), max(self._peak_host, resident_bytes())
        if (
            peak
            and not self._corrected
            and len(self._took) == WATCHED_STEPS
            and self._spec.placement == "auto"
        ):
            self._correct()

    @property
    def measured(self) -> Measured | None:
        """What came of the plan; None until two steps were made under it: the first still follows a step before it."""
        if len(self._took) < 2:
            return None
        return Measured(seconds=median(self._took[1:]), gpu_bytes=self._peak_gpu, host_bytes=self._peak_host)

    def can_relieve(self, error: BaseException) -> bool:
        """Whether a micro-step raised for want of memory, and some can be made.

        Of several ranks one may have run out while the others wait for it: then the error stays one.
        """
        if not isinstance(error, torch.OutOfMemoryError | OutOfBudget):
            return False
        if self._world.mesh.world_size == 1 and self._spec.placement == "auto" and self._on_device():
            return True
        error.add_note(
            "The device has not enough memory: give zero=dict(placement='auto', gpu_memory_limit=...) a lower limit, so that "
            "more lives on the host, or take fewer tokens at once."
        )
        return False

    def relieve(self) -> None:
        """Make room: by a plan for a little less, or before there is one by taking a part of what is on the device off it."""
        self._let_go()
        self._gemini.abandon()
        self._shrunk += SHRINK
        there = self._on_device()
        if not self._replanned():
            gone = there[-max(1, len(there) // 8) :]
            self._gemini.rehome({chunk: Home(parameters="host", state="host") for chunk in gone})
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()
        warnings.warn(
            f"The device ran out of memory; {len(there) - len(self._on_device())} more of {len(self._gemini.chunks)} chunks live "
            "off it from now on. A lower gpu_memory_limit would have been planned with.",
            stacklevel=4,
        )

    def _replanned(self) -> bool:
        """Whether there is a plan, and another one that takes less of the device."""
        if self.plan is None:
            return False
        try:
            self._carry_out(self._plan(self.plan.workload, self.plan.machine))
        except MemoryPlanError:
            return False
        return True

    def _on_device(self) -> list[Chunk]:
        movable = self._spec.stage == 3
        return [
            chunk
            for chunk, home in self._gemini.homes.items()
            if home.state == "device" or (movable and home.parameters == "device")
        ]

    # -- deciding -----------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        spec, world = self._spec, self._world
        machine = replace(
            measure(world.device, everyone=world.everyone, disk=spec.offload_path),
            gpu_bytes=device_bytes(world.device),
        )
        told = tell_all(
            [[asdict(moment) for moment in self._together().moments], asdict(machine)],
            world.everyone,
            world.device,
        )
        # Every rank must come to the same plan: that of the rank that has it worst.
        trace = _worst([Trace(moments=tuple(TracedMoment(**m) for m in moments)) for moments, _ in told])
        machine = replace(
            machine,
            **{
                key: min(entry[key] for _, entry in told)
                for key, value in asdict(machine).items()
                if isinstance(value, int | float)
            },
        )
        workload = workload_of(
            trace, self._gemini.uses(), name=type(self._model).__name__, regime=self._regime, tokens=max(1, self._tokens),
            stage=spec.stage, accumulation=self._accumulation, data_ranks=world.data_size, ranks_per_host=ranks_per_host(world),
            host_base_bytes=max(0, resident_bytes() - self._gemini.memory.home.used_bytes),
        )  # fmt: skip
        try:
            self._carry_out(self._plan(workload, machine))
        except MemoryPlanError as error:
            self._make_do(error)

    def _carry_out(self, plan: Plan) -> None:
        """Move chunks to where a plan wants them."""
        self.plan = plan
        self._took.clear()
        self._peak_gpu = self._peak_host = 0
        chunks = self._gemini.chunks
        if self._spec.placement == "auto":  # the others' chunks are where they were told to be
            self._gemini.rehome(
                {
                    chunks[int(made.name)]: Home(
                        parameters=_PLACES[made.parameters], state=_PLACES[made.state]
                    )
                    for made in plan.chunks
                }
            )
        limit = plan.limits.gpu_bytes
        if self._world.device.type == "cpu" and limit is not None:  # nothing else would hold chunks to it
            self._gemini.memory.compute.budget_bytes = limit - min(plan.workload.non_model_bytes)
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _correct(self) -> None:
        """Plan once more if steps take less of the device than was planned.

        A trace knows the most at every moment of all that is no model data, and the most of model data, not whether both came
        at once. What the whole step did not take can be had by chunks.
        """
        self._corrected = True
        plan, world = self.plan, self._world
        assert plan is not None  # steps are counted from the plan on
        peak = max(tell_all(self._peak_gpu, world.everyone, world.device))
        spare = plan.peak_gpu_bytes - peak
        if spare <= MARGIN * plan.peak_gpu_bytes:
            return
        less = tuple(max(0, value - spare) for value in plan.workload.non_model_bytes)
        self._carry_out(self._plan(replace(plan.workload, non_model_bytes=less), plan.machine))

    def _make_do(self, error: MemoryPlanError) -> None:
        """No plan fits. A GPU shows soon enough whether it really does not: plans leave some room to the unforeseen."""
        if self._world.device.type != "cuda" or self._spec.placement != "auto":
            raise error
        self._wanted = False
        away: Place = "host" if self._spec.offload_path is None else "disk"
        self._gemini.rehome({chunk: Home(parameters="host", state=away) for chunk in self._gemini.chunks})
        torch.cuda.empty_cache()
        if self._world.mesh.rank == 0:
            warnings.warn(f"{error} Everything that can be is off the device now.", stacklevel=6)

    def _plan(self, workload: Workload, machine: Machine) -> Plan:
        """The plan that the spec's placement asks for, within its limits and what the machine has."""
        spec, device = self._spec, self._world.device
        gpu = machine.gpu_bytes
        if spec.gpu_memory_limit is not None:
            gpu = min(gpu, spec.gpu_memory_limit - (CONTEXT_BYTES if device.type == "cuda" else 0))
        limits = Limits(
            gpu_bytes=int(gpu * (1.0 - MARGIN - self._shrunk)) if gpu < UNLIMITED else None, host_bytes=spec.host_memory_limit,
            disk_bytes=None if spec.offload_path is not None else 0,
        )  # fmt: skip
        if spec.placement == "auto":
            return plan_for(spec, workload, machine, limits)
        homes = {str(i): home for i, home in enumerate(self._gemini.homes.values())}
        named = {name: (_KINDS[home.parameters], _KINDS[home.state]) for name, home in homes.items()}
        return placed(workload, machine, limits, homes=named, policy=spec.placement)

    def _together(self) -> Trace:
        """What was seen in all watched steps: most bytes, least seconds."""
        return _worst(self._traces, seconds=min)


_KINDS = {"device": "gpu", "host": "host", "disk": "disk"}
_PLACES: dict[str, Place] = {"gpu": "device", "host": "host", "disk": "disk", "none": "host"}


def _worst(traces: Sequence[Trace], *, seconds: Callable[[list[float]], float] = max) -> Trace:
    """One trace for several of the same step: at every moment the most bytes, and the most or the least seconds.

    Traces with other moments than the first's have only their peak in common with it.
    """
    first = traces[0]
    alike = [trace for trace in traces if trace.order == first.order]
    peak = max((trace.peak_bytes for trace in traces if trace.order != first.order), default=0)
    moments = []
    for i, moment in enumerate(first.moments):
        same = [trace.moments[i] for trace in alike]
        moments.append(
            replace(
                moment, non_model_bytes=max([peak, *(m.non_model_bytes for m in same)]),
                left_bytes=max(m.left_bytes for m in same), seconds=seconds([m.seconds for m in same]),
            )
        )  # fmt: skip
    return Trace(moments=tuple(moments))


def resident_bytes() -> int:
    """What this process has of the host's memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def limit_allocator(device: torch.device, limit: int) -> None:
    """Let this process take no more than ``limit`` bytes of a GPU, so that a smaller card is what it sees."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)


def ranks_per_host(world: World) -> int:
    """How many ranks share this host's memory."""
    return min(world.mesh.world_size, torch.cuda.device_count() or world.mesh.world_size)
