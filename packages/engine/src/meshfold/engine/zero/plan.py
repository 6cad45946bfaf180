"""Placement of a model's state under the entry ``zero``: at first by sizes alone, then the plan that the spec asks for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from meshfold.engine.precision import Precision
from meshfold.engine.zero.memory import PROCESS_BYTES
from meshfold.mesh import Group, SpecError, all_reduce
from meshfold.mesh.spec import ZeroSpec, format_bytes
from meshfold.zero_gemini import MemoryPlanError, ParameterBudget, PlacementRule, Shares
from meshfold.zero_gemini.machine_rates import (
    UNLIMITED_BYTES,
    available_device_bytes,
    available_host_bytes,
    present_host_bytes,
    resident_bytes,
)
from meshfold.zero_gemini.nvme import free_bytes
from meshfold.zero_gemini.planner import (
    DoesNotFit,
    Limits,
    Plan,
    Regime,
    Workload,
    automatic,
    const,
    cpu,
    cuda,
    static,
)
from meshfold.zero_gemini.planner import Machine as Rates


def regime_of(
    spec: ZeroSpec,
    precision: Precision,
    *,
    accumulation: int,
    ranks: int,
    moments: float = 2,
    ours: bool = True,
    disk_reads: int = 1,
) -> Regime:
    """Return the bytes that an element takes under an entry ``zero``.

    Args:
        spec: the entry.
        precision: of the model.
        accumulation: micro-steps of an optimizer step.
        ranks: that share a chunk.
        moments: numbers that the optimizer keeps for an element; Adam's two in float32 have kernels of ours.
        ours: an optimizer with two numbers is Adam.
        disk_reads: times that a step reads state on disk; an optimizer that needs norms reads it twice.
    """
    return Regime.of(
        spec.regime,
        precision.dtype,
        precision.master_dtype,
        accumulation=accumulation,
        ranks=ranks,
        moments=moments,
        ours=ours,
        disk_reads=disk_reads,
    )


def plan_for(spec: ZeroSpec, workload: Workload, rates: Rates, limits: Limits) -> Plan:
    """Return the plan that a spec's placement asks for.

    Raises:
        MemoryPlanError: if it does not fit; it says the least that would.
        SpecError: for shares that cannot be.
    """
    policy = _policy_of(spec)
    return fitting(lambda machine: policy(workload, machine, limits), rates)


def _policy_of(spec: ZeroSpec) -> Callable[[Workload, Rates, Limits], Plan]:
    """Return the function that plans a spec's placement."""
    if spec.placement == "static":
        optimizer, parameters = _fixed_shares(spec)
        return partial(static, offload_optim_frac=optimizer, offload_param_frac=parameters)
    return {"auto": automatic, "cuda": cuda, "cpu": cpu, "const": const}[spec.placement]


def fitting(make: Callable[[Rates], Plan], rates: Rates) -> Plan:
    """Return the plan that a function makes for a machine, without GPU streaming if there is no room for its buffer.

    Raises:
        MemoryPlanError: if neither fits; it says the least that would.
    """
    try:
        return make(rates)
    except DoesNotFit:
        if not rates.gpu_streaming:
            raise
    return make(rates.without_streaming())


def limits_of(spec: ZeroSpec) -> Limits:
    """Return the limits of a plan that the spec gives; for a disk the free space of the folder, if it exists."""
    disk: int | None = 0
    if spec.offload_path is not None:
        folder = Path(spec.offload_path)
        disk = free_bytes(folder) if folder.is_dir() else None
    return Limits(gpu_bytes=spec.gpu_memory_limit, host_bytes=spec.host_memory_limit, disk_bytes=disk)


STATE_SHARE = 0.6
"""Share of the device's memory that placement ``auto`` gives to parameters, gradients and optimizer state at first. With
``gpu_memory_limit`` it gives as little as the host allows, until a plan knows what activations take."""
LITTLE = 0.2
"""How much of ``gpu_memory_limit`` may be taken by all of it for it to stay there."""
MOST = 0.97
"""The same where the host has no room for more."""
BOUNDARY_BYTES = 2**30
"""Parameters on the device under placement ``const``, unless ``gpu_memory_limit`` says how much."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A rank's share of a model, and bytes an element of it.

    Attributes:
        elements: of the model, on this rank's tensor block.
        ranks: that share them; on average, where fewer share experts than the rest.
        parameter: of the parameters that the model computes with.
        state: master weights and optimizer state beside it.
        gradient: in the dtype of its sum.
    """

    elements: int
    ranks: float
    parameter: float
    state: float
    gradient: float

    @classmethod
    def of(cls, regime: Regime, *, elements: int, ranks: float) -> Sizes:
        """Return the sizes of ``elements`` elements in a regime's bytes."""
        return cls(
            elements=elements,
            ranks=ranks,
            parameter=regime.parameter,
            state=regime.state,
            gradient=regime.gradient,
        )

    @property
    def own(self) -> float:
        """Elements of this rank's shards."""
        return self.elements / self.ranks

    @property
    def all(self) -> float:
        """Bytes an element, everything together."""
        return self.parameter + self.state + self.gradient


def first_placements(
    spec: ZeroSpec, device: torch.device, sizes: Sizes, *, ranks_per_host: int, everyone: Group
) -> PlacementRule:
    """Return where a spec puts a model's state; placement ``auto`` decides again after a step. All ranks must call.

    Args:
        spec: the entry.
        device: where the model computes.
        sizes: of the model.
        ranks_per_host: share a host's memory.
        everyone: the group of all ranks. The rank with the least memory decides, since a chunk has the same placement on all.

    Raises:
        SpecError: for shares that cannot be.
        MemoryPlanError: for a model that fits nowhere.
    """
    streams = spec.stage == 3
    state = "host" if spec.offload_path is None else "disk"
    host = _least(spec.host_memory_limit or available_host_bytes(), everyone, device)
    # The process's memory, at least with CUDA's libraries loaded; emulated limits count only chunks.
    base = max(resident_bytes(), PROCESS_BYTES) + 2**30 if device.type == "cuda" else 0
    room = math.inf if host >= UNLIMITED_BYTES else MOST * (host / ranks_per_host - base)
    if spec.placement == "cuda":
        return Shares()
    if spec.placement == "const":
        most = spec.gpu_memory_limit or BOUNDARY_BYTES
        return ParameterBudget(most_bytes=most, element_bytes=math.ceil(sizes.parameter), state=state)  # type: ignore[arg-type]
    if spec.placement in ("cpu", "static"):
        optimizer, parameters = (1.0, 1.0 if streams else 0.0) if spec.placement == "cpu" else _fixed_shares(spec)
        found = Shares(
            host_parameters=parameters,
            host_optimizer=optimizer,
            disk_optimizer=_beyond_host(spec, sizes, optimizer, room),
        )
    else:
        budget = spec.gpu_memory_limit or available_device_bytes(device)
        found = _by_size(spec, float(_least(budget, everyone, device)), sizes, room)
    if room == math.inf and device.type == "cuda" and everyone.index == 0:
        on_host = (found.host_optimizer * sizes.all - found.disk_optimizer * sizes.state) * sizes.own
        _warn_of_the_host(int(ranks_per_host * (on_host + base)))
    return found


def _warn_of_the_host(needed: int) -> None:
    """Warn if ranks need more memory of their host than it has now, which a system without a limit answers by killing them.

    It is no error: some virtual machines get more memory as it is touched.
    """
    there = present_host_bytes()
    if there and needed > there:
        warnings.warn(
            f"zero: the first steps need {format_bytes(needed)} of the host's memory, which has {format_bytes(there)}: the system "
            f"may kill the process. Write host_memory_limit='{max(1, int(MOST * there / 2**30))}GiB', so that the rest stays on "
            "the device, or also offload_path, for a disk",
            stacklevel=2,
        )


def _least(nbytes: int, everyone: Group, device: torch.device) -> int:
    """Return the minimum over all ranks; all must call."""
    where = device if device.type == "cuda" else torch.device("cpu")
    return int(all_reduce(torch.tensor(nbytes, device=where), everyone, "min"))


def _fixed_shares(spec: ZeroSpec) -> tuple[float, float]:
    """Return the fractions of optimizer state and parameters that placement ``static`` puts on the host."""
    optimizer, parameters = spec.offload_optim_frac or 0.0, spec.offload_param_frac or 0.0
    if parameters and spec.stage < 3:
        raise SpecError(
            f"zero: offload_param_frac={parameters} with stage={spec.stage}, which keeps all parameters on the "
            "device: write stage=3, or leave it out"
        )
    if parameters > optimizer:
        raise SpecError(
            f"zero: offload_param_frac={parameters} is above offload_optim_frac={optimizer}: parameters on the host have their "
            "optimizer state there too; raise offload_optim_frac"
        )
    return optimizer, parameters


def _beyond_host(spec: ZeroSpec, sizes: Sizes, optimizer: float, room: float) -> float:
    """Return the fraction of elements whose state goes to disk; ``optimizer``: the fraction whose state is off the device.

    That is all of them, unless the host has a limit: then ``room`` bytes of this rank may stay there.
    """
    if spec.offload_path is None:
        return 0.0
    if spec.host_memory_limit is None:
        return optimizer
    over = optimizer * sizes.own * sizes.all - room
    return min(optimizer, max(0.0, over) / (sizes.own * sizes.state))


def _by_size(spec: ZeroSpec, budget: float, sizes: Sizes, room: float) -> Shares:
    """Place state that does not fit on the device on the host, from the model's end, and the rest on disk.

    ``budget`` and ``room``: this rank's bytes on the device and on the host.
    """
    own, streams = sizes.own, spec.stage == 3
    kept = own if streams else sizes.elements  # elements whose parameters may stay on the device
    rest = sizes.state + sizes.gradient
    # Activations are not measured yet, and a step that runs out of memory cannot be undone: be careful under a user's limit.
    share = STATE_SHARE
    if spec.gpu_memory_limit is not None:
        share = LITTLE if own * rest + kept * sizes.parameter <= LITTLE * budget else 0.0
    free = share * budget - kept * sizes.parameter
    if free >= own * rest:
        return Shares()
    optimizer = min(1.0, 1.0 - max(free, 0.0) / (own * rest))
    disk = 0.0
    over = optimizer * own * sizes.all - room
    if over > 0 and spec.offload_path is not None:
        disk = min(optimizer, over / (own * sizes.state))
    elif over > 0:
        optimizer = room / (own * sizes.all)
        needed = own * (1.0 - optimizer) * sizes.all + (0.0 if streams else sizes.elements * sizes.parameter)
        if needed > MOST * budget:
            raise MemoryPlanError(
                f"zero: {sizes.elements:,} parameters in regime {spec.regime!r} take {sizes.all:.3g} bytes each with their "
                f"gradient, {format_bytes(own * sizes.all)} per rank, but there are {format_bytes(budget)} on the device and "
                f"{format_bytes(room)} on the host: use regime 'B' or 'C', name a folder with offload_path, or use more ranks"
            )
    if free >= 0 and over <= 0:
        return Shares(host_optimizer=optimizer, disk_optimizer=disk)
    return Shares(host_optimizer=optimizer, host_parameters=optimizer if streams else 0.0, disk_optimizer=disk)
