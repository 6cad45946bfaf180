"""Train some configurations by turns on a rank; rank 0 notes seconds and memory of each as soon as it has them."""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

import torch

from benchmarks.foresight.configurations import Configuration, configurations
from meshfold.engine import Engine
from meshfold.engine.zero.residency import Phase
from meshfold.mesh import Group, Mesh, all_reduce, barrier, start
from meshfold.mesh.model_io import LiveBytes
from meshfold.planner.calibration import Effort, pace_of

_WARM_UP, _LEAST = 3, 3  # steps
_SETTLING = 10  # steps, at most, until a memory plan is corrected by its first ones


def run(job: dict[str, Any]) -> None:
    """Measure the job's ``names``; each result is a line of its ``out``, beginning with one that says what is about to run.

    A rank that runs out of memory says so and exits, since others may wait for it: the rest need ranks that begin anew.
    """
    known = configurations()
    with start(device=job["device"]) as process:
        mesh = Mesh({"rank": process.world_size})
        everyone, out = mesh.group("rank"), Path(job["out"])
        for name in job["names"]:
            left = job["until"] - time.time()
            if float(_most(-left, everyone, process.device)) > 0:  # the same on all ranks
                break
            if process.rank == 0:
                _note(out, name=name, begun=True)
            folder = Path(job["folder"]) / f"{name}-{process.rank}"
            try:
                found = measured(known[name], folder, job["window_s"], everyone, process.device)
            except torch.OutOfMemoryError as error:
                _note(
                    out, name=name, error=f"rank {process.rank} ran out of memory: {str(error).splitlines()[0][:160]}"
                )
                raise
            if process.rank == 0:
                _note(out, name=name, **found)
        mesh.close()


def _note(out: Path, **entries: Any) -> None:
    with out.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(entries) + "\n")


def _release(device: torch.device) -> int:
    """Release what an earlier configuration has left, in cycles of objects too; return the bytes that remain on a GPU.

    A limit of an earlier one on this process's share of the GPU ends with it.
    """
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    return torch.cuda.memory_allocated(device)


def _most(value: float, everyone: Group, device: torch.device) -> float:
    """Return the largest value of all ranks."""
    return float(all_reduce(torch.tensor(value, dtype=torch.float64, device=device), everyone, op="max"))


def _mean(value: float, everyone: Group, device: torch.device) -> float:
    """Return the mean of all ranks' values."""
    return float(all_reduce(torch.tensor(value, dtype=torch.float64, device=device), everyone)) / everyone.size


def measured(
    one: Configuration, folder: Path, window_s: float, everyone: Group, device: torch.device
) -> dict[str, Any]:
    """Return the seconds of each timed step of the slowest rank, and the bytes of the fullest one.

    On a GPU bytes are the allocator's largest; on a CPU those of all tensors that operators made, in one more step that is not
    timed; under ``zero``, whose chunks no operator makes, there are none. ``before``: those that were allocated before it began.
    ``first`` and ``last``: seconds since the epoch between which the timed steps ran. ``pace``: on a CPU, of each step, seconds of
    matmuls before and after it, the mean of all ranks (:func:`meshfold.planner.calibration.pace_of`).
    """
    before = _release(device)
    model = one.choose(folder)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    counted = not on_gpu and "zero" not in one.spec
    live = LiveBytes()
    with ExitStack() as stack:
        if counted:
            stack.enter_context(live)
        engine = Engine(
            model.build,
            parallel=one.spec,
            optimizer=dict(name="adamw", lr=1e-5),
            precision=one.precision,
            clip_grad_norm=1.0,
            gradient_accumulation=one.accumulate,
            recompute=one.recompute or None,
            device=device,
        )
        with engine:
            ids = torch.randint(model.vocab_size, (one.batch, one.seq_len), generator=torch.Generator().manual_seed(0))
            shards = [engine.shard_batch(dict(input_ids=rows, labels=rows)) for rows in ids.chunk(one.accumulate)]

            def step() -> float:
                """Train once; return this rank's seconds, in which it waits for nobody who has not begun."""
                barrier(everyone, device)
                begin = time.perf_counter()
                for shard in shards:
                    engine.run_step(shard)
                if on_gpu:
                    torch.cuda.synchronize(device)
                return time.perf_counter() - begin

            step()
            live.take()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            step()
            held = torch.cuda.max_memory_allocated(device) if on_gpu else live.take()[0] if counted else 0
            stack.close()
            for _ in range(_WARM_UP - 2):
                step()
            for _ in range(_SETTLING):  # a first plan of zero is a trial, which moves chunks
                if _is_corrected(engine):
                    break
                step()
            steps = max(_LEAST, math.ceil(window_s / _most(step(), everyone, device)))
            pace = pace_of(device, Effort())
            marks: list[float] = []

            def note_pace() -> None:
                if pace is not None:
                    barrier(everyone, device)
                    marks.append(_mean(pace.mark(), everyone, device))

            first, seconds = time.time(), []
            note_pace()
            for _ in range(steps):
                seconds.append(_most(step(), everyone, device))
                note_pace()
            last = time.time()
            if on_gpu:
                held = max(held, torch.cuda.max_memory_allocated(device))
            said = _said_of(engine)
    most = {"bytes": held, "before": before}
    return {
        "seconds": seconds,
        "first": first,
        "last": last,
        **({"pace": [(before + after) / 2 for before, after in pairwise(marks)]} if marks else {}),
        **said,
        **{name: int(_most(float(value), everyone, device)) for name, value in most.items()},
    }


def _is_corrected(engine: Engine) -> bool:
    """Return True if no memory plan waits for steps to correct it. The same on all ranks of a stage."""
    return engine.residency is None or engine.residency.phase not in (Phase.TRACING, Phase.TRIAL)


def _said_of(engine: Engine) -> dict[str, Any]:
    """Return what the engine's own memory plan expects, and the rates that its steps showed; empty without a plan."""
    plan = None if engine.residency is None else engine.residency.plan
    if plan is None or engine.residency is None:
        return {}
    rates = {key: value for key, value in asdict(plan.machine).items() if isinstance(value, int | float)}
    return {"plan": dict(seconds=plan.seconds, strategy=plan.strategy, phase=engine.residency.phase.value, rates=rates)}


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
