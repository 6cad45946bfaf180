"""Meshfold: the engine with the entry ``zero``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.zero_offload.decoder import count, decoder
from benchmarks.zero_offload.job import Job

RATES = (
    "host_memory",
    "moments_memory",
    "gpu_streaming",
    "host_memory_while_streaming",
    "h2d",
    "d2h",
    "pcie_both",
    "gpu_memory",
    "disk_read",
    "disk_write",
)
"""Of the planner's machine, bytes/s."""
PALM_WORDS = 50304
"""Vocabulary of every published PaLM; the tiny one has it here too."""


class Ours:
    """See :class:`benchmarks.zero_offload.job.Trainer`."""

    def __init__(self, job: Job) -> None:
        from meshfold.engine import Engine
        from meshfold.huggingface import palm

        zero: dict[str, Any] = {"stage": 3, "regime": job.regime, **job.options, **job.flags}
        if zero["placement"] == "auto":
            limits = {"gpu_memory_limit": job.gpu_limit, "host_memory_limit": job.host_limit}
            zero |= {name: limit for name, limit in limits.items() if limit}
            if job.disk:
                zero["offload_path"] = job.disk
        spec: dict[str, Any] = {"zero": zero} if job.ranks == 1 else {"data": job.ranks, "zero": zero}
        self.flags = {"parallel": spec, "precision": "bf16", "clip_grad_norm": job.clip}
        make = partial(decoder, *job.sizes)
        if job.palm:
            make = partial(palm, job.palm, layers=job.layers, vocab_size=PALM_WORDS)
        with torch.device("meta"):
            self.parameters = count(make())
        self.engine = Engine(
            make,
            spec,
            optimizer=dict(name="adamw", lr=job.lr),
            precision="bf16",
            clip_grad_norm=job.clip,
            recompute="blocks" if job.palm else None,  # blocks of the decoder do so by themselves
        )
        self.device = self.engine.device

    def step(self, ids: Tensor) -> tuple[float, float | None]:
        loss = self.engine.train_step({"input_ids": ids, "labels": ids})
        return loss, None if self.engine.last is None else self.engine.last.grad_norm

    def predicted(self) -> dict[str, Any]:
        residency = self.engine.residency
        plan = None if residency is None else residency.plan
        names = ("seconds", "peak_gpu_bytes", "peak_host_bytes")
        said: dict[str, Any] = {name: getattr(plan, name, None) for name in names}
        if residency is None or plan is None:
            return said
        # What the seconds were made from, and the host's steps as they were: where the two differ, and why.
        said["rates"] = {name: getattr(plan.machine, name) for name in RATES}
        said["terms"] = {f"{term.phase}: {term.name}": term.seconds for term in plan.terms if term.seconds}
        said["host_elements"] = plan.host_elems
        measured = residency.measured
        return said | {"host_steps_seen": {} if measured is None else dict(measured.host_steps)}

    def close(self) -> None:
        self.engine.close()


build = Ours
