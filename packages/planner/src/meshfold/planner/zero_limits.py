"""Plans of ``zero`` within a spec's limits: what is left of a device for a plan, as in training, and why none fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshfold.engine.zero import USUAL_CONTEXT_BYTES, DeviceLimit, limits_of, plan_for
from meshfold.mesh.collectives.push import bytes_of_channel, channel_bytes
from meshfold.mesh.spec import ZeroSpec
from meshfold.planner.estimates import Memory
from meshfold.planner.machines import Machine
from meshfold.zero_gemini import MemoryPlanError
from meshfold.zero_gemini.planner import DoesNotFit, Limits, Plan, Workload, timeline
from meshfold.zero_gemini.planner import Machine as Rates


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Bytes of a device that are not the allocator's.

    Attributes:
        channels: push channels of tensor parallelism, besides those of chunks.
        context: CUDA and its libraries.
    """

    channels: int
    context: int

    @classmethod
    def of(cls, machine: Machine) -> Outside:
        """Return those of a machine's devices."""
        context = USUAL_CONTEXT_BYTES if machine.kind == "gpu" else 0
        return cls(channels=channel_bytes(machine.reaches), context=context)


def fit(spec: ZeroSpec, workload: Workload, rates: Rates, outside: Outside) -> tuple[Plan | None, str, Memory]:
    """Plan a workload within a spec's limits.

    Returns:
        The plan, or None and the reason; its memory, or that of everything on a device without limits.
    """
    channels = outside.channels + workload.channels * bytes_of_channel()
    limits, own = limits_of(spec), None
    rates = replace(rates, gpu_bytes=max(0, rates.gpu_bytes - channels))
    if limits.gpu_bytes is not None:
        asked = DeviceLimit(bytes=limits.gpu_bytes, outside=channels + outside.context)
        if asked.allocator_bytes < rates.gpu_bytes:
            own, limits = asked, replace(limits, gpu_bytes=asked.plan_bytes)
    try:
        found = plan_for(spec, workload, rates, limits)
    except MemoryPlanError as error:
        plenty = 2**60
        roomy = replace(rates, gpu_bytes=plenty, host_bytes=plenty, disk_bytes=plenty)
        anywhere = plan_for(replace(spec, placement="cuda", offload_path=None), workload, roomy, Limits())
        told = own.explained(error) if own is not None and isinstance(error, DoesNotFit) else error
        return None, str(told), replace(memory_of(anywhere), channels=channels)
    return found, "", replace(memory_of(found), channels=channels)


def memory_of(found: Plan) -> Memory:
    """Return the memory of a plan at its peak."""
    kinds = max(timeline(found), key=lambda timestep: timestep.bytes).kinds
    return Memory(
        parameters=kinds["resident parameters"] + kinds["gathered"],
        masters=0,
        gradients=kinds["gradients"],
        optimizer=kinds["optimizer state"],
        activations=kinds["non-model"] + kinds["kept activations"],
        host=found.peak_host_bytes,
        disk=found.peak_disk_bytes,
    )
