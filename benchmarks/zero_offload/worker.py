"""One rank of one contestant, in a process of its own: takes its cores and its limits, trains, writes what it found."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

DOES_NOT_FIT = 42
"""Exit code where memory was too small: after that it is in no state to go on from."""


def main(path: str) -> NoReturn:
    """Do the job in a file."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    take_cores(json.loads(Path(path).read_text())["cores"], rank)  # before the libraries look
    from benchmarks.zero_offload.job import Job

    job = Job.load(Path(path))
    found: dict[str, Any] = {"contestant": job.contestant, "rows": job.rows}
    code = 0
    try:
        _train(job, rank, found)
    except BaseException as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:500]
        code = DOES_NOT_FIT if _is_memory(error) else 1
    found |= _peaks(rank)
    _write(job, rank, found)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the libraries' own ending, which may wait for ranks that are gone


def take_cores(cores: int, rank: int) -> None:
    """Stay on this rank's cores; where there are fewer, on all there are."""
    there = sorted(os.sched_getaffinity(0))
    mine = there[rank * cores : (rank + 1) * cores]
    os.sched_setaffinity(0, mine or there)


def _train(job: Any, rank: int, found: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(min(job.cores, len(os.sched_getaffinity(0))))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        if job.gpu_limit:
            total = torch.cuda.mem_get_info(rank)[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, job.gpu_limit / total), rank)
    begin = time.perf_counter()
    trainer = importlib.import_module(job.module).build(job)
    _synchronize()
    found |= {
        "seconds_to_build": time.perf_counter() - begin,
        "parameters": trainer.parameters,
        "flags": json.loads(json.dumps(trainer.flags, default=str)),
        "device": str(trainer.device),
        "steps": [],
    }
    if job.search:
        _search(job, rank, trainer, found)
        return
    ids = _ids(job, rank, trainer.device)
    for number in range(job.warm_up + job.steps):
        found["steps"].append(_step(job, trainer, ids, timed=number >= job.warm_up))
        found["predicted"] = trainer.predicted()
        _write(job, rank, {**found, **_peaks(rank)})
    found |= _peaks(rank)
    trainer.close()


def _step(job: Any, trainer: Any, ids: Any, *, timed: bool) -> dict[str, Any]:
    _synchronize()
    begin = time.perf_counter()
    loss, norm = trainer.step(ids)
    _synchronize()
    return {
        "seconds": time.perf_counter() - begin,
        "ended": time.time(),
        "timed": timed,
        "loss": loss,
        "grad_norm": norm,
        "clip_factor": None if norm is None else min(1.0, (job.clip or float("inf")) / max(norm, 1e-30)),
    }


def _search(job: Any, rank: int, trainer: Any, found: dict[str, Any]) -> None:
    """Note about the largest number of rows that trains, within a sixteenth; raises where a try does not fit.

    By doubling, then bisecting; where the peaks of two sizes say that less than the double will fit, by those. Rows with which
    the allocator has to give back in every step what it had cached, and to ask for it again, are too many: a step of GPT2-XL
    takes a fifth longer then.
    """
    low: int = job.low
    high: int = job.high
    peaks: list[tuple[int, int]] = []
    while high == 0 or high - low > max(1, low // 16):
        rows = _next(low, high, peaks, job.gpu_limit) if low or high else job.rows
        found["tried"] = rows
        _free()
        ids = _ids(dataclasses.replace(job, rows=rows), rank, trainer.device)
        for _ in range(2):  # the second finds the optimizer's state in its way
            before = _retries(rank)
            trainer.step(ids)
        if _anywhere(_retries(rank) > before):
            high = rows
            _free()
            continue
        low = rows
        peaks.append((rows, _peaks(rank)["gpu_peak_bytes"]))
        found["fits"] = low
        _write(job, rank, found)
    if low == 0:
        raise RuntimeError("not one row fits")
    found["fits"] = low


def _retries(rank: int) -> int:
    """How often the allocator had to give cached memory back so as to get other."""
    import torch

    return int(torch.cuda.memory_stats(rank)["num_alloc_retries"]) if torch.cuda.is_available() else 0


def _anywhere(here: bool) -> bool:
    """Whether it is so on any rank."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return here
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, here)
    return any(told)


def _next(low: int, high: int, peaks: list[tuple[int, int]], limit: int) -> int:
    """The number of rows to try: the same on every rank."""
    import torch.distributed as dist

    if high:
        return (low + high) // 2
    rows = 2 * low or 1
    if len(peaks) > 1 and limit:
        (fewer, less), (more, most) = peaks[-2:]
        slope = (most - less) / (more - fewer)
        reached = int(low + (0.96 * limit - most) / slope) if slope > 0 else rows
        rows = max(min(rows, reached), low + max(1, low // 16))
    if dist.is_initialized() and dist.get_world_size() > 1:
        agreed = [rows]
        dist.broadcast_object_list(agreed, src=0)
        rows = agreed[0]
    return rows


def _free() -> None:
    """Blocks that an earlier number of rows left in the allocator would make the next one look too large."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _ids(job: Any, rank: int, device: Any) -> Any:
    """The same random words in every step: a loss that can fall."""
    import torch

    from benchmarks.zero_offload.decoder import WORDS

    generator = torch.Generator().manual_seed(rank)
    return torch.randint(WORDS, (job.rows, job.seq_len), generator=generator).to(device)


def _peaks(rank: int) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.is_available()
    return {
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(rank) if gpu else 0,
        "gpu_reserved_peak_bytes": torch.cuda.max_memory_reserved(rank) if gpu else 0,
        "allocator_retries": _retries(rank),
        "own_host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "ended_children_host_peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def _write(job: Any, rank: int, found: dict[str, Any]) -> None:
    """All at once: whoever ends this process in the middle finds the steps before."""
    if rank:
        return
    new = Path(job.out + ".new")
    new.write_text(json.dumps(found))
    new.replace(job.out)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _is_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error)


if __name__ == "__main__":
    main(sys.argv[1])
