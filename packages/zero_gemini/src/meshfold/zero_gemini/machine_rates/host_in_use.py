"""Rates of a host's memory while an optimizer steps as in training: a state of many chunks in turn, beside copies both ways.

A sample of one chunk is faster: its pages are near, and little else uses the memory. On hosts of H100s it reached 119 to 188 GB/s
where steps of a model reached 77 to 96 in first halves and 119 to 134 in second ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from meshfold.kernels import adam_update_moments, adam_update_parameters
from meshfold.zero_gemini.machine_rates.samples import ADAM, HostSample
from meshfold.zero_gemini.memory.arena import Memory
from meshfold.zero_gemini.memory.copies import stream_of, synchronize
from meshfold.zero_gemini.optimizer.cpu_executor import threads_for_steps
from meshfold.zero_gemini.optimizer.master_weights import state_of
from meshfold.zero_gemini.planner import REGIMES, Regime

_CHUNKS = 8
_LEAST_S = 0.6


@dataclass(frozen=True, kw_only=True)
class HostInUse:
    """Bytes a second of host memory in a training step, of the cores and of simultaneous copies together.

    Attributes:
        parameters: while the cores write parameters, which are copied to the device.
        moments: while they write moments, parameters are copied to the device and gradients from it.
    """

    parameters: float
    moments: float


def measure_host_in_use(device: torch.device, regime: str = "A") -> HostInUse:
    """Measure this rank's share of the host's memory as a training step uses it. Takes 7.5 GB of it with a GPU, else 0.9.

    All ranks of a host should call at the same time, as they train.

    Args:
        device: that copies go to and come from; on a CPU there are none.
        regime: of the optimizer's state, a key of :data:`meshfold.zero_gemini.planner.REGIMES`.
    """
    of, threads = REGIMES[regime], torch.get_num_threads()
    memory = Memory(device)
    chunks = [HostSample(memory, of) for _ in range(_CHUNKS)]
    torch.set_num_threads(threads_for_steps(threads))
    try:
        return HostInUse(
            parameters=_rate(chunks, of, device, second=False), moments=_rate(chunks, of, device, second=True)
        )
    finally:
        torch.set_num_threads(threads)
        synchronize(device)
        for chunk in chunks:
            chunk.free()


def _rate(chunks: list[HostSample], regime: Regime, device: torch.device, *, second: bool) -> float:
    """Return the bytes a second of a half of steps: of the cores' and the copies' bytes, by the seconds of the cores' work."""
    copied = 0.0
    if device.type == "cuda":
        copied = regime.parameter + (regime.gradient if second else 0.0)
    each = (regime.second_pass if second else regime.first_pass) + copied
    kernel = adam_update_moments if second else adam_update_parameters
    there = torch.empty_like(chunks[0].gradient, device=device) if device.type == "cuda" else None
    beside = stream_of(device) if there is not None else None
    elements, spent, begin = 0, 0.0, time.perf_counter()
    warm = True
    while not elements or time.perf_counter() - begin < _LEAST_S:
        for number, chunk in enumerate(chunks):
            chunk.show()
            if second and there is not None and beside is not None:
                with torch.cuda.stream(beside):  # a gradient that arrives for another chunk
                    chunks[number - 1].gradient.copy_(there.zero_(), non_blocking=True)
            started = time.perf_counter()
            state = state_of(chunk.weights, chunk.planes)
            kernel(state, chunk.gradient, ADAM, step=1, grad_scale=1.0, start=0, seed=0)
            if not warm:
                spent += time.perf_counter() - started
                elements += chunk.elements
        synchronize(device)
        if warm:
            warm, begin = False, time.perf_counter()
    return each * elements / max(spent, 1e-9)
