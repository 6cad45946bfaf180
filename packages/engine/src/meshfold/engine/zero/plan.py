"""Settings of the entry ``zero``: bytes of an element, limits, and the plan of where chunks live."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshfold.engine.precision.precision import Precision
from meshfold.engine.zero.homes import gradient_dtype
from meshfold.mesh import SpecError
from meshfold.mesh.spec import ZeroSpec
from meshfold.zero_gemini import MemoryPlanError
from meshfold.zero_gemini.nvme import free_bytes
from meshfold.zero_gemini.planner import (
    REGIMES,
    Limits,
    Plan,
    Regime,
    Workload,
    const,
    cpu,
    cuda,
    on_device,
    plan,
    static,
)
from meshfold.zero_gemini.planner import Machine as Rates

if TYPE_CHECKING:
    pass

NEAR = 1.05
"""How much longer a step with everything on the device may take than the fastest plan."""


def regime_of(
    spec: ZeroSpec, precision: Precision, *, accumulation: int, ranks: int, moments: int = 2
) -> Regime:
    """Bytes an element under an entry ``zero``.

    Args:
        spec: the entry.
        precision: of the model.
        accumulation: micro-steps of an optimizer step.
        ranks: that share a chunk.
        moments: numbers that the optimizer keeps for an element; Adam's two in float32 have kernels of ours.
    """
    gradient = gradient_dtype(precision, accumulation=accumulation, ranks=ranks).itemsize
    if (
        precision.name == "fp64" or moments != 2
    ):  # stepped by torch: reads all and writes all but the gradient
        width, true = precision.dtype.itemsize, precision.master_dtype.itemsize
        state = true * (moments + (true != width))
        step = gradient + 2 * (width + state)
        return Regime(
            name=f"{moments} moments", parameter=width, state=state, gradient=gradient, step=step, first_pass=step,
            second_pass=0,
        )  # fmt: skip
    found = REGIMES[spec.regime if precision.name == "bf16" else precision.name]
    more = gradient - found.gradient  # each pass reads it once
    return replace(
        found, gradient=gradient, step=found.step + more, first_pass=found.first_pass + more,
        second_pass=found.second_pass + more,
    )  # fmt: skip


def plan_for(spec: ZeroSpec, workload: Workload, rates: Rates, limits: Limits) -> Plan:
    """The plan that a spec's placement asks for.

    ``auto`` keeps everything on the device where that fits and nothing else is faster by more than a twentieth: to step
    a few chunks on the host saves a little of the device's time, as long as nothing disturbs the host. Of the activations
    that may be recomputed as many are kept there as fit.

    Raises:
        MemoryPlanError: if it does not fit; it says the least that would.
        SpecError: for shares that cannot be.
    """
    if spec.placement == "auto":
        found = plan(workload, rates, limits)
        try:
            simple = on_device(workload, rates, limits)
        except MemoryPlanError:
            return found
        return replace(simple, policy="auto") if simple.seconds <= NEAR * found.seconds else found
    if spec.placement == "static":
        optimizer, parameters = spec.offload_optim_frac or 0.0, spec.offload_param_frac or 0.0
        if parameters and spec.stage < 3:
            raise SpecError(
                f"zero: offload_param_frac={parameters} with stage={spec.stage}, which keeps all parameters on the "
                "device: write stage=3, or leave it out"
            )
        return static(workload, rates, limits, offload_optim_frac=optimizer, offload_param_frac=parameters)
    return {"cuda": cuda, "cpu": cpu, "const": const}[spec.placement](workload, rates, limits)


def limits_of(spec: ZeroSpec) -> Limits:
    """Return the limits of a plan, as far as the spec says; of a disk the free space of the folder, if it is there."""
    disk: int | None = 0
    if spec.offload_path is not None:
        folder = Path(spec.offload_path)
        disk = free_bytes(folder) if folder.is_dir() else None
    return Limits(gpu_bytes=spec.gpu_memory_limit, host_bytes=spec.host_memory_limit, disk_bytes=disk)
