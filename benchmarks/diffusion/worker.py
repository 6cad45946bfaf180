"""One contestant trains a denoiser for a while, in processes of its own; rank 0 writes JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks.diffusion.cases import GIB, batch_of, model_of

Step = Callable[[], Tensor]


class Squares:
    """Mean squared distance of the output from ``target``, in float32."""

    batch_fields = ("target",)

    def __call__(self, output: Any, batch: Any) -> Tensor:
        return torch.nn.functional.mse_loss(output.sample.float(), batch["target"].float())


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def batch(job: dict[str, Any], model: Any) -> dict[str, Tensor]:
    """Return this rank's rows."""
    rank = int(os.environ.get("RANK", "0"))
    whole = batch_of(model, job["rows"], tuple(job["tokens"]), seed=1)
    return {name: value.chunk(job["ranks"])[rank].to(device()) for name, value in whole.items()}


def ours(
    job: dict[str, Any], *, sharded: Mapping[str, Any] = MappingProxyType({}), regime: str = "A", **settings: Any
) -> Step:
    """Return the step of Meshfold: one line of a spec, the model as diffusers has it.

    Args:
        job: what is trained.
        sharded: more words of ``zero``, where everything is on the device.
        regime: how Adam keeps its state under a limit; in float32 there is one way.
        settings: of the engine.
    """
    from benchmarks.memory_plans import settle
    from meshfold.engine import Engine

    limit = job["limit"]
    # A core would draw billions of weights for minutes. The engine gives each rank its part of what is on the host.
    model = model_of(job["kind"], job["config"], device() if limit is None else None).cpu()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    spec: dict[str, Any] = dict(data=job["ranks"])
    if limit is not None:
        spec["zero"] = dict(
            stage=3, gpu_memory_limit=int(limit * GIB), regime=regime if job["dtype"] == "bfloat16" else "A"
        )
    elif job["ranks"] > 1:
        spec["zero"] = dict(stage=3, placement="cuda", **sharded)
    engine = Engine(
        model,
        spec,
        precision="bf16" if job["dtype"] == "bfloat16" else "fp32",
        clip_grad_norm=1.0,
        optimizer=dict(name="adamw", lr=1e-6, weight_decay=0.01),
        loss_fn=Squares(),
        recompute=None if job["recompute"] == "none" else job["recompute"],
        gradient_accumulation=job["micro_steps"],
        **settings,
    )
    settle(job, engine)
    job["captured"] = bool(settings.get("cuda_graph"))
    rows = batch(job, model)
    parts = [
        {name: value.chunk(job["micro_steps"])[i] for name, value in rows.items()} for i in range(job["micro_steps"])
    ]

    def step() -> Tensor:
        total = torch.zeros((), device=device())
        for part in parts:
            engine.run_step(part)
            total += engine.runner.loss.detach()
        return total / len(parts)

    return step


def diffusers(job: dict[str, Any], *, compiled: str = "", channels_last: bool = False) -> Step:
    """Return the step of diffusers' scripts on one GPU.

    Args:
        job: what is trained.
        compiled: "whole", or "blocks": what ``compile_repeated_blocks`` compiles; empty: nothing.
        channels_last: weights of convolutions, and with them activations, in the memory format that diffusers' documentation
            recommends.
    """
    from benchmarks.peers.absent import AbsentError
    from benchmarks.peers.denoisers import alone

    if job["ranks"] > 1:
        raise AbsentError("diffusers' scripts train on one GPU here: FSDP2 is the contestant on several")
    model: Any = model_of(job["kind"], job["config"], device())  # drawn there as ours is: the same weights
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    if compiled == "blocks":
        model.compile_repeated_blocks(backend=job["backend"])
    backend = job["backend"] if compiled == "whole" else None
    return alone(model, batch(job, model), getattr(torch, job["dtype"]), backend)


def fsdp2(job: dict[str, Any], *, compiled: bool) -> Step:
    """Return the step of torch's FSDP2."""
    from benchmarks.peers.denoisers import fsdp2 as step_of

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = model_of(job["kind"], job["config"], device())
    rows = batch(job, model)
    return step_of(
        model,
        rows,
        getattr(torch, job["dtype"]),
        job["backend"] if compiled else None,
        ranks=job["ranks"],
        recompute=job["recompute"] == "blocks",
    )


def channels_last(job: dict[str, Any]) -> dict[str, Any]:
    """Return how blocks are compiled so that all convolutions compute with channels last; another back end has no such option."""
    options = dict(options={"force_layout_optimization": True}) if job["backend"] == "inductor" else {}
    return dict(backend=job["backend"], **options)


KEPT_WHOLE: Mapping[str, Any] = MappingProxyType(dict(reshard_after_forward=False))

CONTESTANTS: dict[str, Callable[[dict[str, Any]], Step]] = {
    "ours": ours,
    "ours, compiled": lambda job: ours(job, compile=dict(backend=job["backend"])),
    "ours, compiled, captured": lambda job: ours(job, compile=dict(backend=job["backend"]), cuda_graph=True),
    "ours, regime B, compiled, captured": lambda job: ours(
        job, regime="B", compile=dict(backend=job["backend"]), cuda_graph=True
    ),
    "ours, regime C, compiled, captured": lambda job: ours(
        job, regime="C", compile=dict(backend=job["backend"]), cuda_graph=True
    ),
    "ours, channels last, compiled": lambda job: ours(job, compile=channels_last(job)),
    "ours, channels last, compiled, captured": lambda job: ours(job, compile=channels_last(job), cuda_graph=True),
    "ours, kept whole, compiled": lambda job: ours(job, sharded=KEPT_WHOLE, compile=dict(backend=job["backend"])),
    "diffusers": diffusers,
    "diffusers, channels last": lambda job: diffusers(job, channels_last=True),
    "diffusers, blocks compiled": lambda job: diffusers(job, compiled="blocks"),
    "diffusers, channels last, blocks compiled": lambda job: diffusers(job, compiled="blocks", channels_last=True),
    "diffusers, compiled": lambda job: diffusers(job, compiled="whole"),
    "diffusers, channels last, compiled": lambda job: diffusers(job, compiled="whole", channels_last=True),
    "FSDP2": lambda job: fsdp2(job, compiled=False),
    "FSDP2, compiled": lambda job: fsdp2(job, compiled=True),
}


if __name__ == "__main__":
    from benchmarks.timed_training import take_device, train_or_absent

    job = json.loads(sys.argv[1])
    take_device()
    if job["kind"] == "FluxTransformer2DModel":
        # On an H100 with torch 2.11 cuDNN's backward of its attention, heads of 128, reads illegal memory.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.is_available() and job["limit"] is not None:  # whatever the plan says: beyond it is out of memory
        place = torch.cuda.current_device()
        whole = torch.cuda.get_device_properties(place).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["limit"] * GIB / whole), place)
    train_or_absent(job, CONTESTANTS[job["contestant"]])
