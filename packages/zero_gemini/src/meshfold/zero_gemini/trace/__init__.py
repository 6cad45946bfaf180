"""One micro-step, watched: when each unit was entered, what was alive then besides model data, how long it computed.

Without a device, on tensors without values::

    memory, clock = LiveBytes(), OperatorClock(flops=629e12, bytes_per_second=4.2e12)
    with StepTracer(model, memory=memory, clock=clock) as tracer:
        loss_of(model(batch)).backward()
    workload = workload_of(tracer.trace(), chunks, ...)

On a GPU the same with ``CudaBytes(device, model_bytes=peak_of(arena))`` and ``CudaClock(device)``.
"""

from meshfold.zero_gemini.trace.chunks import chunk_uses
from meshfold.zero_gemini.trace.clocks import Clock, CudaClock, OperatorClock, WallClock
from meshfold.zero_gemini.trace.layers import LayerWatch
from meshfold.zero_gemini.trace.live import CudaBytes, LiveBytes, MemoryProbe, peak_of
from meshfold.zero_gemini.trace.moments import Trace, TracedLayer, TracedMoment
from meshfold.zero_gemini.trace.phases import PhaseClock, PhaseSeconds
from meshfold.zero_gemini.trace.tracer import StepTracer
from meshfold.zero_gemini.trace.workload import ChunkUse, workload_of

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
]
