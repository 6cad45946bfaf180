"""One contestant trains a mixture for a while, in processes of its own; rank 0 writes JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks.experts.planned import model_of, spec_of

Step = Callable[[], Tensor]


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def batch(job: dict[str, Any]) -> Tensor:
    """Return this rank's part of the token ids ``rows length``."""
    ids = torch.randint(
        job["model"]["vocab_size"], (job["rows"], job["length"]), generator=torch.Generator().manual_seed(1)
    )
    return ids.chunk(job["ranks"])[int(os.environ.get("RANK", "0"))].to(device())


def ours(job: dict[str, Any], **settings: Any) -> Step:
    """Return the step of Meshfold: one line of a spec, the model as transformers has it."""
    from meshfold.engine import Engine

    with device():
        model = model_of(job["model"], job["length"], job["dtype"])
    engine = Engine(
        model,
        spec_of(job["ranks"], job["contestant"]),
        precision="bf16" if job["dtype"] == "bfloat16" else "fp32",
        clip_grad_norm=1.0,
        optimizer=dict(name="adamw", lr=1e-6, weight_decay=0.01),
        recompute="blocks" if job["recompute"] == "blocks" else None,
        **settings,
    )
    ids = batch(job)

    def step() -> Tensor:
        engine.run_step(dict(input_ids=ids, labels=ids))
        return engine.runner.loss

    return step


def transformers(job: dict[str, Any], *, experts: bool) -> Step:
    """Return the step of transformers: FSDP2, with its expert parallel or without."""
    from benchmarks.peers.transformers_experts import transformers_step

    with device():
        model = model_of(job["model"], job["length"], job["dtype"])
    return transformers_step(model, batch(job), job["ranks"], experts=experts, recompute=job["recompute"] == "blocks")


def torchtitan(job: dict[str, Any], *, compiled: bool) -> Step:
    """Return the step of torchtitan's own model."""
    from benchmarks.peers.torchtitan_experts import torchtitan_step

    return torchtitan_step(job, batch(job), compiled=compiled)


CONTESTANTS: dict[str, Callable[[dict[str, Any]], Step]] = {
    "ours": ours,
    "ours, all_to_all": ours,
    "ours, stage 1": ours,
    "ours, kernels off": lambda job: ours(job, kernels="off"),
    "ours, compiled": lambda job: ours(job, compile=dict(backend=job["backend"])),
    "transformers": lambda job: transformers(job, experts=True),
    "transformers, FSDP2 alone": lambda job: transformers(job, experts=False),
    "torchtitan": lambda job: torchtitan(job, compiled=False),
    "torchtitan, compiled": lambda job: torchtitan(job, compiled=True),
}
DEFAULT = ("ours", "transformers", "torchtitan", "torchtitan, compiled")


if __name__ == "__main__":
    from benchmarks.timed_training import take_device, train_or_absent

    job = json.loads(sys.argv[1])
    take_device()
    train_or_absent(job, CONTESTANTS[job["contestant"]])
