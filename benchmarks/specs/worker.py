"""What a rank does: build one contestant, train it, and let rank 0 note losses, times and memory."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import synchronize
from benchmarks.specs.contestants import builder
from benchmarks.specs.work import Work


def _meet() -> None:
    """Begin a step together: ranks make their batches in times that differ, and who waits for them is not at work."""
    if dist.is_initialized():
        dist.barrier()
    synchronize()


class Trainer(Protocol):
    """A contestant that is ready to train.

    Attributes:
        flags: of its library, as they are in force; for the result.
        device: of this rank.
        rank: of all.
    """

    flags: dict[str, Any]
    device: torch.device
    rank: int

    def prepare(self, batch: Tensor) -> Any:
        """What this rank is given of a whole batch ``rows seq_len``; not timed."""

    def step(self, batch: Any) -> float:
        """Train on it: the mean loss over all ranks' tokens."""

    def close(self) -> None:
        """Give everything back."""


def run(args: argparse.Namespace, job: dict[str, Any]) -> int:
    """One rank; rank 0 writes what it found after each step, so that it stays if a later one fails."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    work = Work(args)
    begin = time.perf_counter()
    trainer = builder(job["contestant"], args.ranks)(work)
    found: dict[str, Any] = {
        "flags": trainer.flags,
        "build_seconds": time.perf_counter() - begin,
        "losses": [],
        "seconds": [],
        "ends": [],
        "peak_bytes": 0,
    }
    for step in range(job["steps"]):
        batch = trainer.prepare(work.batch(step))
        _meet()
        begin = time.perf_counter()
        found["losses"].append(trainer.step(batch))
        synchronize()
        found["seconds"].append(time.perf_counter() - begin)
        found["ends"].append(time.time())
        if torch.cuda.is_available():
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
            if step == 0:  # from here on what building took does not count
                torch.cuda.reset_peak_memory_stats()
        if trainer.rank == 0:
            Path(job["out"]).write_text(json.dumps(found))
    trainer.close()
    return 0
