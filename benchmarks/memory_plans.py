"""Report of a timed contestant's memory plan, and whether the plan has come to rest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch


def settle(job: dict[str, Any], engine: Any) -> None:
    """Give a job its ``settled`` and ``said``, which :func:`benchmarks.timed_training.train` reads."""
    before = 0  # retries of the allocator until steps are timed

    def settled() -> bool:
        nonlocal before
        before = _retries()
        return engine.residency is None or bool(engine.residency.is_settled)

    job["settled"] = settled
    job["said"] = lambda: _plan_of(engine, retries_before=before)


def _retries() -> int:
    """Return how often the allocator has released its cache before it found memory."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if torch.cuda.is_available() else 0


def _plan_of(engine: Any, *, retries_before: int) -> dict[str, Any]:
    """Return what an engine's memory plan expects and is made from, what its steps took, and how often the allocator had to give
    memory back, in all and while steps were timed; empty without a plan."""
    plan = None if engine.residency is None else engine.residency.plan
    if plan is None:
        return {}
    found: dict[str, Any] = dict(
        seconds=plan.seconds,
        gpu_bytes=plan.peak_gpu_bytes,
        moves=engine.residency.moves,
        phase=engine.residency.phase.value,
        steps_alike=engine.states.gemini.steps_alike,
        measured=None if engine.residency.measured is None else asdict(engine.residency.measured),
        machine=asdict(plan.machine),
        workload={**asdict(plan.workload), "light_timesteps": sorted(plan.workload.light_timesteps)},
        chunks=[(chunk.name, chunk.parameters, chunk.state) for chunk in plan.chunks],
        kept=[layer.name for layer in plan.layers if layer.kept],
        strategy=plan.strategy,
        capture=None if engine.capture is None else asdict(engine.capture),
    )
    if torch.cuda.is_available():
        statistics, (free, total) = torch.cuda.memory_stats(), torch.cuda.mem_get_info()
        found.update(
            reserved_bytes=torch.cuda.max_memory_reserved(),
            outside_bytes=total - free - torch.cuda.memory_reserved(),  # CUDA's own, where no other process has the GPU
            retries=_retries(),
            retries_while_timed=_retries() - retries_before,
            out_of_memory=statistics.get("num_ooms", 0),
        )
    return found | dict(table=str(plan))
