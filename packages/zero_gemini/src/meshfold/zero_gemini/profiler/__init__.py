"""Profile of one micro-step: when each unit was entered, how many bytes other than model data were alive, how long it computed.

Without a device, on meta tensors::

    memory, clock = LiveBytes(), OperatorClock(roofline(flops=629e12, bytes_per_second=4.2e12))
    with StepTracer(model, memory=memory, clock=clock) as tracer:
        loss_of(model(batch)).backward()
    workload = workload_of(tracer.trace(), chunks, ...)

On a GPU the same with ``CudaBytes(device, model_bytes=peak_of(arena))`` and ``CudaClock(device)``.
"""

from __future__ import annotations

import warnings
from typing import Any

from meshfold.mesh.model_io import LiveBytes
from meshfold.zero_gemini.profiler.clocks import (
    Clock,
    CudaClock,
    OperatorClock,
    PhaseClock,
    PhaseSeconds,
    WallClock,
    roofline,
)
from meshfold.zero_gemini.profiler.layers import LayerWatch
from meshfold.zero_gemini.profiler.live import CudaBytes, MemoryProbe, peak_of
from meshfold.zero_gemini.profiler.trace import Trace, TracedLayer, TracedTimestep, worst_trace
from meshfold.zero_gemini.profiler.tracer import StepTracer
from meshfold.zero_gemini.profiler.workload import ChunkUse, chunk_uses, workload_of


def __getattr__(name: str) -> Any:
    """Return the class that version 0.1 called ``TracedMoment``, with a DeprecationWarning."""
    if name != "TracedMoment":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.TracedMoment is now {__name__}.TracedTimestep: change the import", DeprecationWarning, stacklevel=2
    )
    return TracedTimestep


__all__ = [
    "ChunkUse",
    "Clock",
    "CudaBytes",
    "CudaClock",
    "LayerWatch",
    "LiveBytes",
    "MemoryProbe",
    "OperatorClock",
    "PhaseClock",
    "PhaseSeconds",
    "StepTracer",
    "Trace",
    "TracedLayer",
    "TracedTimestep",
    "WallClock",
    "chunk_uses",
    "peak_of",
    "roofline",
    "workload_of",
    "worst_trace",
]
