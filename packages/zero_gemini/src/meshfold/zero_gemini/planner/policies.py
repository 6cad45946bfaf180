"""Constructors of a Plan: the planned one, and fixed placements with the same checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import ceil

import numpy as np

from meshfold.mesh import SpecError, did_you_mean
from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.planner.copies_ahead import with_copies_ahead
from meshfold.zero_gemini.planner.family import Family, layer_order
from meshfold.zero_gemini.planner.memory import gpu_kinds
from meshfold.zero_gemini.planner.options import (
    ALL_GPU,
    DISK_RESIDENT,
    DISK_STREAMED,
    GPU_ONLY,
    HOST_RESIDENT,
    HOST_STREAMED,
    Choice,
    Ints,
)
from meshfold.zero_gemini.planner.problem import Case
from meshfold.zero_gemini.planner.rates import Machine
from meshfold.zero_gemini.planner.refuse import refusal, size
from meshfold.zero_gemini.planner.result import Plan, build, canonical, problem_of
from meshfold.zero_gemini.planner.search import Best, exhaustive_search, search
from meshfold.zero_gemini.planner.shadow_copies import with_shadow_copies
from meshfold.zero_gemini.planner.workload import Limits, Workload

NEAR = 1.05
"""Ratio up to which a step with everything on the device may take longer than the fastest plan."""
MOST_PLANS = 10**9
"""The most plans that are tried one by one."""


def plan(workload: Workload, machine: Machine, limits: Limits | None = None) -> Plan:
    """Return the fastest plan within the limits: optimizer state, parameters, activations and clipping decided together.

    When gathers begin and which chunks have shadow copies is decided anew, whatever a plan of the same workload has decided before:
    less memory may be left now.

    Raises:
        MemoryPlanError: if nothing fits; it names the smallest GPU and host bytes with which something does.
    """
    case = _case(_undecided(workload), machine, limits)
    found = with_shadow_copies(_plan(case, search(case)), _found_within)
    return with_copies_ahead(found, _found_within)


def automatic(workload: Workload, machine: Machine, limits: Limits | None = None) -> Plan:
    """Return everything on the device where that fits and no other plan is faster by more than a twentieth, else :func:`plan`.

    Stepping a few chunks on the host saves a little of the device's time, but only while nothing disturbs the host. Of the
    activations that may be recomputed as many are kept on the device as fit.

    Raises:
        MemoryPlanError: if nothing fits; it says the least that would.
    """
    found = plan(workload, machine, limits)
    try:
        simple = on_device(_undecided(workload), machine, limits)
    except MemoryPlanError:
        return found
    return replace(simple, policy="auto") if simple.seconds <= NEAR * found.seconds else found


def exhaustive(workload: Workload, machine: Machine, limits: Limits | None = None) -> Plan:
    """Return the best plan by trying every one, for up to about ten chunks: the reference for tests of :func:`plan`.

    Raises:
        MemoryPlanError: if nothing fits.
        SpecError: if there are too many plans to try.
    """
    case = _case(workload, machine, limits)
    options = 5 if case.limits.disk_bytes else 3
    count = options ** len(workload.chunks) * 2 ** len(workload.layers)
    if count > MOST_PLANS:
        raise SpecError(f"{count:.3g} plans are too many to try one by one (at most {MOST_PLANS:.0g}): use plan")
    return _plan(case, exhaustive_search(case))


def cuda(workload: Workload, machine: Machine, limits: Limits | None = None, *, kept: Collection[str] = ()) -> Plan:
    """Return the plan with everything on the GPU.

    Args:
        kept: names of the layers whose activations are kept, here and below.

    Raises:
        MemoryPlanError: if it does not fit, here and below; it says by how much and whether any plan does.
        SpecError: for an unknown layer, here and below.
    """
    chunks = np.full(len(workload.chunks), ALL_GPU)
    return _fixed("cuda", workload, machine, limits, chunks, kept)


def on_device(workload: Workload, machine: Machine, limits: Limits | None = None) -> Plan:
    """Return the plan with everything on the GPU, and as many activations as fit, those first that save most seconds per byte.

    Raises:
        MemoryPlanError: if it does not fit even with no activations kept.
    """
    case = _case(workload, machine, limits)
    problem, layers = case.problem(case.strategies()[0], GPU_ONLY), layer_order(workload)
    found = Family(problem, np.arange(len(workload.chunks)), layers).best(np.inf)
    kept = [] if found is None else [workload.layers[j].name for j in np.flatnonzero(found[1].layers)]
    return cuda(workload, machine, limits, kept=kept)


def cpu(workload: Workload, machine: Machine, limits: Limits | None = None, *, kept: Collection[str] = ()) -> Plan:
    """Return the plan with everything on the host, and parameters streamed."""
    chunks = np.full(len(workload.chunks), HOST_STREAMED)
    return _fixed("cpu", workload, machine, limits, chunks, kept)


def static(
    workload: Workload,
    machine: Machine,
    limits: Limits | None = None,
    *,
    offload_optim_frac: float = 0.0,
    offload_param_frac: float = 0.0,
    kept: Collection[str] = (),
) -> Plan:
    """Return the plan with fixed shares of the elements on the host: the last chunks, so that the first are stepped on the GPU.

    Args:
        offload_optim_frac: at least this share has its optimizer state on the host.
        offload_param_frac: at least this share is streamed; its optimizer state must be on the host too.
    """
    for name, value in (
        ("offload_optim_frac", offload_optim_frac),
        ("offload_param_frac", offload_param_frac),
    ):
        if not 0 <= value <= 1:
            raise SpecError(f"{name}={value}: give a fraction from 0 to 1")
    if offload_param_frac > offload_optim_frac:
        raise SpecError(
            f"offload_param_frac={offload_param_frac} is more than offload_optim_frac={offload_optim_frac}: a parameter "
            "that is streamed is stepped on the host; raise offload_optim_frac"
        )
    sizes = np.array([chunk.elems for chunk in workload.chunks])
    after = np.cumsum(sizes[::-1])[::-1] - sizes  # elements in later chunks
    chunks = np.full(len(sizes), ALL_GPU)
    chunks[after < ceil(offload_optim_frac * workload.elems)] = HOST_RESIDENT
    chunks[after < ceil(offload_param_frac * workload.elems)] = HOST_STREAMED
    return _fixed("static", workload, machine, limits, chunks, kept)


def const(
    workload: Workload,
    machine: Machine,
    limits: Limits | None = None,
    *,
    boundary_bytes: int | None = None,
    kept: Collection[str] = (),
) -> Plan:
    """Return the plan with optimizer state on the host, and never more than ``boundary_bytes`` of parameters on the GPU.

    In order of use, parameters stay on the GPU while there is room left for the streamed ones. None is 512 MiB, or the bytes used
    and prefetched at one timestep if they are more.
    """
    kinds = gpu_kinds(workload)
    parameters = kinds["resident parameters"] + kinds["gathered"]  # chunk option timestep
    streamed = parameters[:, HOST_STREAMED]
    held = streamed.sum(0)
    if boundary_bytes is None:
        boundary_bytes = max(512 * 2**20, int(held.max()))
    if held.max() > boundary_bytes:
        raise MemoryPlanError(
            f"const: boundary_bytes={boundary_bytes} is below the {int(held.max())} bytes of parameters that are used "
            f"or prefetched at timestep {int(held.argmax())}: raise it, or use smaller chunks"
        )
    chunks = np.full(len(workload.chunks), HOST_STREAMED)
    for i in range(len(chunks)):
        more = held - streamed[i] + parameters[i, HOST_RESIDENT]
        if more.max() > boundary_bytes:
            break
        held, chunks[i] = more, HOST_RESIDENT
    return _fixed("const", workload, machine, limits, chunks, kept)


def evaluate_placement(
    workload: Workload,
    machine: Machine,
    limits: Limits | None = None,
    *,
    placements: Mapping[str, tuple[str, str]],
    policy: str,
) -> Plan:
    """Return the plan of a given placement: its bytes and seconds.

    Args:
        placements: of each chunk by name, where its parameters are (``gpu`` or ``host``) and its optimizer state (or ``disk``).
        policy: name of the placement.

    Raises:
        MemoryPlanError: if it does not fit.
        SpecError: for parameters on the host with their state on the GPU.
    """
    options = {("gpu", "gpu"): ALL_GPU, ("gpu", "host"): HOST_RESIDENT, ("host", "host"): HOST_STREAMED}
    options |= {("gpu", "disk"): DISK_RESIDENT, ("host", "disk"): DISK_STREAMED}
    for chunk in workload.chunks:
        if placements[chunk.name] not in options:
            raise SpecError(f"chunk {chunk.name}: parameters and state on {placements[chunk.name]} cannot be")
    chunks = np.array([options[placements[chunk.name]] for chunk in workload.chunks])
    return _fixed(policy, workload, machine, limits, chunks, ())


def _case(workload: Workload, machine: Machine, limits: Limits | None) -> Case:
    return Case(workload=workload, machine=machine, limits=(limits or Limits()).on(machine))


def _undecided(workload: Workload) -> Workload:
    """Return the workload without what a plan decides of it."""
    return replace(workload, ready=None, shadow_copies=None)


def _found_within(workload: Workload, machine: Machine, limits: Limits) -> Plan | None:
    """Return the fastest plan, None if nothing fits."""
    case = _case(workload, machine, limits)
    best = search(case)
    return None if best is None else _plan(case, best)


def _plan(case: Case, best: Best | None) -> Plan:
    if best is None:
        raise refusal(case)
    return build(case, best.problem.strategy, best.choice, policy="auto", proved=best.proved)


def _fixed(
    policy: str,
    workload: Workload,
    machine: Machine,
    limits: Limits | None,
    chunks: Ints,
    kept: Collection[str],
) -> Plan:
    """Return the plan of a fixed choice, with the fastest clipping strategy that fits."""
    workload = replace(workload, shadow_copies=None)
    case = _case(workload, machine, limits)
    names = [layer.name for layer in workload.layers]
    for name in kept:
        if name not in names:
            raise SpecError(f"kept={name!r} is not a layer of {workload.name!r}.{did_you_mean(name, names)}")
    layers = np.array([int(name in kept) for name in names], dtype=np.int64)
    choice = canonical(workload, Choice(chunks=chunks, layers=layers))
    plans = [
        build(case, strategy, choice, policy=policy)
        for strategy in case.strategies()
        if problem_of(case, strategy, choice).fits(choice)
    ]
    if plans:
        return with_shadow_copies(min(plans, key=lambda made: made.seconds), lambda *_: None)
    wanted = build(case, case.strategies()[0], choice, policy=policy)
    peaks = (wanted.peak_gpu_bytes, wanted.peak_host_bytes, wanted.peak_disk_bytes)
    over = [
        f"{size(peak)} of {what} (the limit is {size(limit)})"
        for what, peak, limit in zip(("GPU memory", "host memory", "disk"), peaks, case.limits.as_tuple(), strict=True)
        if peak > limit
    ]
    fewer = "keep fewer activations, " if kept else ""
    raise MemoryPlanError(
        f"placement {policy!r} of {workload.name!r} needs {' and '.join(over)}: raise the limit, {fewer}or use placement "
        "'auto', which plans within the limits"
    )
