"""Profile of one micro-step: when each unit was entered, how many bytes other than model data were alive, how long it computed.

Without a device, on meta tensors::

    memory, clock = LiveBytes(), OperatorClock(flops=629e12, bytes_per_second=4.2e12)
    with StepTracer(model, memory=memory, clock=clock) as tracer:
        loss_of(model(batch)).backward()
    workload = workload_of(tracer.trace(), chunks, ...)

On a GPU the same with ``CudaBytes(device, model_bytes=peak_of(arena))`` and ``CudaClock(device)``.
"""

from meshfold.mesh.model_io import LiveBytes
from meshfold.zero_gemini.profiler.clocks import (
    Clock,
    CudaClock,
    OperatorClock,
    PhaseClock,
    PhaseSeconds,
    WallClock,
)
from meshfold.zero_gemini.profiler.layers import LayerWatch
from meshfold.zero_gemini.profiler.live import CudaBytes, MemoryProbe, peak_of
from meshfold.zero_gemini.profiler.moments import Trace, TracedLayer, TracedMoment, worst_trace
from meshfold.zero_gemini.profiler.tracer import StepTracer
from meshfold.zero_gemini.profiler.workload import ChunkUse, chunk_uses, workload_of

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
    "TracedMoment",
    "WallClock",
    "chunk_uses",
    "peak_of",
    "workload_of",
    "worst_trace",
]
