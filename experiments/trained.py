"""Training steps of language models that run: what the ``measured.py`` of experiments on memory have in common."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from experiments.planned import GB
from meshfold.engine import Engine
from meshfold.mesh import all_reduce, barrier
from meshfold.models import GPTConfig
from meshfold.zero_gemini import MemoryPlanError

UNFIT = (torch.OutOfMemoryError, MemoryError, MemoryPlanError)
"""Errors of a model that does not fit."""
WARM, WARM_COMPILED = 2, 4
"""Steps that do not count, and that do not with compiled blocks."""


def gpt_of(options: argparse.Namespace) -> GPTConfig:
    """Return the GPT that the sizes of a measured.py describe."""
    return GPTConfig(
        vocab_size=options.vocabulary,
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        max_positions=options.sequence,
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all rows of a measurement have in common.

    Attributes:
        sequence: tokens.
        steps: that count; others run before them, more with compiled blocks: the first is eager, and the next are compiled for.
        settle: seconds of further steps before these on a GPU, whose clock falls as it gets warm.
        recompute: as for the engine.
        device: of this rank.
        limit: bytes of a GPU that may be allocated; None: all. A CPU has no such limit.
    """

    sequence: int
    steps: int
    recompute: str | None
    device: torch.device
    settle: float = 5.0
    limit: float | None = None

    @property
    def precision(self) -> str:
        """bf16 on a GPU, float32 on a CPU."""
        return "bf16" if self.device.type == "cuda" else "fp32"


def trained(
    build: Callable[[], nn.Module],
    words: int,
    parallel: Mapping[str, object],
    job: Job,
    *,
    batch: int,
    kernels: str = "auto",
    compiled: object = False,
) -> dict[str, Any]:
    """Train a language model of so many words for a few steps on all ranks; it is random, and so is its batch.

    Args:
        build: the model.
        words: of its vocabulary.
        parallel: the spec.
        job: what all rows have in common.
        batch: sequences of all ranks.
        kernels: as for the engine.
        compiled: every block by torch.compile; as for the engine.

    Returns:
        ``fits``, and if it does the median seconds of a step, samples a second, the most GB allocated on the fullest GPU (None on
        a CPU), and the loss of the last step that counts without further steps before it.
    """
    cuda = job.device.type == "cuda"
    if cuda and job.limit is not None:
        whole = torch.cuda.get_device_properties(job.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.limit / whole), job.device)
    try:
        return {"fits": True, **_steps(build, words, parallel, job, batch, kernels=kernels, compile=compiled)}
    except UNFIT as error:
        return {"fits": False, "why": str(error).partition("\n")[0]}
    finally:
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0, job.device)


def _steps(
    build: Callable[[], nn.Module],
    words: int,
    parallel: Mapping[str, object],
    job: Job,
    batch: int,
    **settings: Any,
) -> dict[str, Any]:
    cuda = job.device.type == "cuda"
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(words, (batch, job.sequence), generator=generator)
    with Engine(
        build,
        parallel=parallel,
        optimizer=dict(name="adamw", lr=1e-4),
        precision=job.precision,
        recompute=job.recompute,
        device=job.device,
        **settings,
    ) as engine:
        rows = engine.shard_batch({"input_ids": tokens, "labels": tokens})
        world = engine.mesh.group(*engine.mesh.names)
        losses: list[Tensor | float] = []

        def step() -> float:
            barrier(world, job.device)
            began = time.perf_counter()
            losses.append(engine.train_step(rows))
            if cuda:
                torch.cuda.synchronize(job.device)
            return time.perf_counter() - began

        for _ in range(WARM_COMPILED if settings.get("compile") else WARM):
            last = step()
        if cuda:  # all ranks make as many
            slowest = float(all_reduce(torch.tensor(last, dtype=torch.float64, device=job.device), world, op="max"))
            for _ in range(math.ceil(job.settle / slowest)):
                step()
            torch.cuda.reset_peak_memory_stats(job.device)
        times = [step() for _ in range(job.steps)]
        peak = float(torch.cuda.max_memory_allocated(job.device)) if cuda else 0.0
        found = torch.tensor([median(times), peak], dtype=torch.float64, device=job.device)
        seconds, most = all_reduce(found, world, op="max").tolist()
    return {
        "seconds": seconds,
        "samples/s": batch / seconds,
        "GB": most / GB if cuda else None,
        "loss": float(losses[job.steps + WARM - 1]),  # after as many steps in all rows
    }
