"""Measurements of a training step that a plan is made from. The ranks that make one plan agree on them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from meshfold.mesh import Group
from meshfold.mesh.collectives import all_gather_object
from meshfold.zero_gemini.machine_rates.available_memory import available_device_bytes, resident_bytes
from meshfold.zero_gemini.machine_rates.observed import with_observed_rates
from meshfold.zero_gemini.machine_rates.samples import measure_machine
from meshfold.zero_gemini.memory.arena import Memory
from meshfold.zero_gemini.optimizer.kernel_runs import StepKind, StepTiming
from meshfold.zero_gemini.planner import Machine, Regime
from meshfold.zero_gemini.profiler import Trace, worst_trace

TRACED_STEPS = 2
"""Steps that are traced: the first also pays for one-time work of the process."""
CORRECTED_AFTER = 6
"""Steps under a plan until it is corrected. All but the first two count for its speed: the first follows a step before the
plan, and the second makes kernels and takes memory for the first time. The median of four is used: on a host with other work,
two steps in a row took 1.4 times as long as the others."""
WORTH_MOVING = 0.97
"""Chunks move once more if another plan takes at most this fraction of a step's seconds."""
ALLOCATOR_MARGIN = 0.03
"""Share of the device's limit that is left to the allocator's gaps."""


@dataclass(frozen=True, kw_only=True)
class StepMeasurements:
    """Measurements of one training step, the worst of all ranks that plan together.

    Attributes:
        trace: at every timestep the most bytes and seconds of any rank.
        machine: the minimum of each rate over the ranks.
        host_base_bytes: host bytes of a process besides the chunks, the most of any rank.
    """

    trace: Trace
    machine: Machine
    host_base_bytes: int


def measure_step(
    traces: Sequence[Trace],
    memory: Memory,
    *,
    regime: Regime,
    everyone: Group,
    planning: Group,
    disk: str | os.PathLike[str] | None = None,
    host: bool = True,
    timings: Mapping[StepKind, StepTiming] = MappingProxyType({}),
) -> StepMeasurements:
    """Measure the machine and merge it with what steps showed; the result is the same on all ranks that plan together.

    All ranks must call.

    Args:
        traces: of this rank's first micro-steps; of each timestep the fastest run counts.
        memory: holds the chunks.
        regime: bytes an element.
        everyone: all ranks: those of one host are measured side by side.
        planning: the ranks that make one plan.
        disk: folder for optimizer state; None: no disk.
        host: also measure a GPU's host, see :func:`measure_machine`.
        timings: of the optimizer's steps on the host before the plan. Those on disk do not count: a first step reads nothing
            from disk, because unwritten state is zero.

    Raises:
        DiskError: if one of the ranks cannot use the disk.
    """
    device = memory.device
    machine = replace(
        measure_machine(device, everyone=everyone, disk=disk, regime=regime.name, host=host),
        gpu_bytes=available_device_bytes(device),
    )
    machine = with_observed_rates(machine, regime, {what: one for what, one in timings.items() if what != "disk"})
    base = max(0, resident_bytes() - memory.host_arena.used_bytes)
    mine = [worst_trace(traces, seconds=min).to_json(), asdict(machine), base]
    told = all_gather_object(mine, planning, device)
    return StepMeasurements(
        trace=worst_trace([Trace.from_json(words) for words, _, _ in told]),
        machine=slowest(machine, [entry for _, entry, _ in told]),
        host_base_bytes=max(base for _, _, base in told),
    )


def ranks_per_host(ranks: int) -> int:
    """Return how many of all ranks share this host's memory."""
    return min(ranks, torch.cuda.device_count() or ranks)


def slowest(machine: Machine, told: Sequence[Mapping[str, Any]]) -> Machine:
    """Return a machine with the minimum of each rate over ranks; ``told``: their machines as dicts."""
    numbers = [key for key, value in asdict(machine).items() if isinstance(value, int | float)]
    return replace(machine, **{key: min(entry[key] for entry in told) for key in numbers})
