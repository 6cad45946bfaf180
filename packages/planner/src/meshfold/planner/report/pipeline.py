"""The plan of a pipeline as tables and a Chrome trace: costs of each stage and rank, and the simulated schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshfold.mesh.spec import format_bytes, format_table
from meshfold.planner.estimates import Estimate, Times
from meshfold.planner.machines import Machine
from meshfold.planner.report.tables import format_seconds, machine_line, total_row

if TYPE_CHECKING:
    from meshfold.pipeline import Simulation
    from meshfold.planner.pipeline_estimate import PipelineEstimate


def stage_table(found: PipelineEstimate) -> str:
    """Return a table of each stage's costs for a micro-batch."""
    durations = found.simulation.costs.durations
    rows: list[tuple[str, ...]] = [("stage", "rank", "blocks", "F", "B", "W", "kept to B", "kept to W", "sent on")]
    for stage, seconds in zip(found.stages, durations, strict=True):
        times = (format_seconds(seconds[op]) for op in ("F", "B", "W"))  # type: ignore[index]
        kept = (format_bytes(size) for size in (stage.activation_bytes, stage.waiting_bytes, sum(stage.sent)))
        rows.append((str(stage.number), str(stage.rank), str(stage.blocks), *times, *kept))
    return "\n".join(["a stage takes for a micro-batch", *format_table(rows, ">")])


def rank_table(found: PipelineEstimate) -> str:
    """Return a table of what each rank of the pipeline holds, and how long it computes."""
    simulation = found.simulation
    rows: list[tuple[str, ...]] = [("rank", "micro-batches", "activations", "all else", "together", "busy")]
    for rank, memory in enumerate(found.memory):
        live, busy = str(simulation.peak_microbatches[rank]), format_seconds(simulation.busy[rank])
        sizes = (memory.activations, memory.total - memory.activations, memory.total)
        rows.append((str(rank), live, *map(format_bytes, sizes), busy))
    return "\n".join(["a rank of the pipeline holds at most, of its stages", *format_table(rows, ">")])


def pipeline_time_table(found: Estimate, pipeline: PipelineEstimate, times: Times, machine: Machine, nodes: int) -> str:
    """Return a table of the time of a step."""
    simulation = pipeline.simulation
    schedule = simulation.schedule
    fits = not found.refusal and max(memory.total for memory in pipeline.memory) <= machine.memory
    sends = ", ".join(format_seconds(one) for one in dict.fromkeys(simulation.costs.send))
    chunks = (
        f"{'chunks':<17}{format_seconds(pipeline.chunk_seconds):>12}  of the rank that moves and steps its own longest"
    )
    lines = [
        f"a step takes, on {machine_line(machine, nodes)}",
        f"{'pipeline':<17}{format_seconds(pipeline.schedule_seconds):>12}  {schedule.name}, "
        f"{schedule.microbatches} micro-batches: {simulation.bubble:.1%} of the ranks' time is idle, a message takes {sends}",
        *[chunks] * (pipeline.chunk_seconds > 0),
        f"{'data traffic':<17}{format_seconds(times.data):>12}  may run as stages become complete",
        *[f"{'optimizer':<17}{format_seconds(times.optimizer):>12}"] * (times.optimizer > 0),
        total_row(
            times.beside(pipeline.seconds),
            pipeline.seconds + times.data + times.optimizer,
            found.tokens,
        ),
        f"{'memory':<17}{format_bytes(machine.memory):>12}  a device: {'it fits' if fits else 'it does NOT fit'}",
    ]
    return "\n".join(lines)


def pipeline_numbers(found: PipelineEstimate) -> dict[str, Any]:
    """Return a pipeline's plan as numbers for JSON."""
    simulation = found.simulation
    return {
        "schedule": simulation.schedule.name,
        "microbatches": simulation.schedule.microbatches,
        "schedule_seconds": found.schedule_seconds,
        "chunk_seconds": found.chunk_seconds,
        "makespan": simulation.makespan,
        "bubble": simulation.bubble,
        "send_seconds": list(simulation.costs.send),
        "stages": [
            {
                "rank": stage.rank,
                "blocks": stage.blocks,
                "flops": list(stage.flops),
                "seconds": list(durations.values()),
                "activation_bytes": stage.activation_bytes,
                "waiting_bytes": stage.waiting_bytes,
                "sent_bytes": sum(stage.sent),
            }
            for stage, durations in zip(found.stages, simulation.costs.durations, strict=True)
        ],
        "ranks": [
            {
                "memory_bytes": memory.total,
                "activation_bytes": memory.activations,
                "microbatches": live,
                "busy": busy,
            }
            for memory, live, busy in zip(found.memory, simulation.peak_microbatches, simulation.busy, strict=True)
        ],
    }


def schedule_trace(simulation: Simulation) -> dict[str, Any]:
    """Return a simulated schedule for chrome://tracing or Perfetto: a row for every rank, times in microseconds."""
    name: dict[str, Any] = {
        "ph": "M",
        "pid": 0,
        "name": "process_name",
        "args": {"name": simulation.schedule.name},
    }
    events = [name]
    for rank, actions in enumerate(simulation.ranks):
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "name": str(one.action),
                "ts": one.start * 1e6,
                "dur": (one.end - one.start) * 1e6,
            }
            for one in actions
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
