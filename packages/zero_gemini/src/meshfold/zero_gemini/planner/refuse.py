"""Error text for when nothing fits: the smallest sufficient memory, the limit that is too low, and the change to make."""

from __future__ import annotations

from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.planner.problem import Case
from meshfold.zero_gemini.planner.rates import GiB, MiB
from meshfold.zero_gemini.planner.search import least_bytes
from meshfold.zero_gemini.planner.workload import Limits, Workload

_PLENTY = 2**60


class DoesNotFit(MemoryPlanError):
    """No plan is within the limits.

    Attributes:
        minimum_gpu_bytes: the smallest GPU limit with a plan, other limits unchanged; None if none helps.
        minimum_host_bytes: the same for the host.
        binds: ``gpu`` if no host memory or disk can help, ``host`` if the GPU's limit suffices with more of them.
    """

    def __init__(self, text: str, *, gpu: int | None, host: int | None, binds: str) -> None:
        super().__init__(text)
        self.minimum_gpu_bytes, self.minimum_host_bytes, self.binds = gpu, host, binds


def refusal(case: Case) -> DoesNotFit:
    """Return the error for a case in which nothing fits."""
    workload = case.workload
    gpu_limit, host_limit, disk_limit = case.limits.as_tuple()
    gpu, host = least_bytes(case, "gpu"), least_bytes(case, "host")
    roomy = Limits(gpu_bytes=gpu_limit, host_bytes=_PLENTY, disk_bytes=_PLENTY)
    alone = least_bytes(Case(workload=workload, machine=case.machine, limits=roomy), "gpu")
    binds = "gpu" if alone is None or alone > gpu_limit else "host"
    words = [
        f"{workload.name!r} ({workload.elems:,} elements, regime {workload.regime.name}) does not fit in "
        f"{size(gpu_limit)} of GPU, {size(host_limit)} of host memory and {size(disk_limit)} of disk; "
        f"the {'GPU' if binds == 'gpu' else 'host'} limit binds."
    ]
    if gpu is not None:
        words.append(f"With host and disk as they are it needs at least {size(gpu)} of GPU memory.")
    else:
        words.append(
            f"The host memory is too small whatever the GPU has: the process alone takes {size(workload.host_base_bytes)}."
        )
    if host is not None:
        words.append(f"With GPU and disk as they are it needs at least {size(host)} of host memory.")
    else:
        words.append("No amount of host memory helps.")
    if binds == "gpu":
        words.append(_largest_timestep(workload))
        if workload.largest_output:
            words.append(f"The largest output of a layer is {workload.largest_output}.")
        lower = ["fewer tokens at once"]
        if workload.whole_logits:
            lower.append("a loss without whole logits (kernels='auto', and cross entropy of all that the head returns)")
        if not workload.layers and not workload.recomputed:
            lower.append("activations recomputed (recompute='blocks')")
        words.append(f"Raise the GPU's limit, or lower what that timestep needs: {', or '.join(lower)}.")
    else:
        smaller = {"A": "B (8 bytes an element)", "B": "C (6 bytes an element)", "fp16": "A in bf16"}
        change = ["raise the host's limit", "give it disk" if not disk_limit else "give it more disk"]
        if workload.regime.name in smaller:
            change.append(f"use regime {smaller[workload.regime.name]}")
        if workload.clipping and workload.strategies is None:
            change.append("train without clipping, which holds no gradients")
        words.append(f"Or {', '.join(change)}, or use more data ranks.".replace("Or raise", "Raise"))
    return DoesNotFit(" ".join(words), gpu=gpu, host=host, binds=binds)


def _largest_timestep(workload: Workload) -> str:
    """Describe when activations and temporary tensors need the most memory, and how much."""
    most = max(workload.non_model_bytes)
    timestep = workload.non_model_bytes.index(most)
    half = "forward" if timestep < workload.forward_timesteps else "backward"
    where = f"the {half}"
    if workload.units:
        unit = workload.units[timestep]
        where += f" of {unit!r}" if unit else " of the model's own code"
    if timestep == workload.forward_timesteps - 1:
        where += " and the loss"
    return f"Activations and temporary tensors take {size(most)} in {where}."


def size(count: int) -> str:
    """Return bytes in readable form, with the exact number where it is not obvious."""
    if count >= _PLENTY:
        return "no limit"
    if not count:
        return "0 bytes"
    if count < GiB:
        return f"{count:,} bytes" if count < MiB else f"{count:,} bytes ({count / MiB:.2f} MiB)"
    if count % GiB == 0:
        return f"{count // GiB} GiB"
    return f"{count:,} bytes ({count / GiB:.2f} GiB)"
