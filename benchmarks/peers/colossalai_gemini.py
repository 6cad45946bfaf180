"""Colossal-AI: Gemini, placement static with everything offloaded, fp16, chunks fetched ahead: its fastest setting."""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zero_offload.decoder import count, decoder, fill
from benchmarks.zero_offload.job import Job, gpu_or_cpu, merged


class Gemini:
    """See :class:`benchmarks.zero_offload.job.Trainer`."""

    def __init__(self, job: Job) -> None:
        colossalai: Any = importlib.import_module("colossalai")
        booster: Any = importlib.import_module("colossalai.booster")
        plugins: Any = importlib.import_module("colossalai.booster.plugin")
        optimizers: Any = importlib.import_module("colossalai.nn.optimizer")
        colossalai.launch(
            rank=int(os.environ["RANK"]),
            world_size=job.ranks,
            host=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
        )
        self.device = gpu_or_cpu(int(os.environ["LOCAL_RANK"]))
        base = {
            "placement_policy": "static",
            "shard_param_frac": 1.0,
            "offload_optim_frac": 1.0,
            "offload_param_frac": 1.0,
            "max_prefetch": 4,
            "precision": "fp16",
            "initial_scale": 2.0**10,  # a larger one makes it skip steps, and skipped steps look fast
            "pin_memory": True,
            "hidden_dim": job.hidden,
        }
        settings = merged(base, job.flags)
        self.clip = job.clip
        if job.clip is not None:
            settings["max_norm"] = job.clip
        self.flags = {"colossalai": metadata.version("colossalai"), "GeminiPlugin": settings}
        # Its lazy initialisation does not know every operation, so the model is first whole, in fp16, on the GPU.
        model = _on_device(job, self.device)
        self.parameters = count(model)
        optimizer = optimizers.HybridAdam(model.parameters(), lr=job.lr, weight_decay=0.01)
        boosted = booster.Booster(plugin=plugins.GeminiPlugin(**settings)).boost(model, optimizer)
        self.model, self.optimizer = boosted[0], boosted[1]

    def step(self, ids: Tensor) -> tuple[float, float | None]:
        loss = self.model(ids, ids).loss
        self.optimizer.backward(loss)
        scale = float(getattr(self.optimizer.mix_precision_mixin, "loss_scale", 1.0))
        self.optimizer._current_grad_norm = None  # so that one is found only if this step was made
        self.optimizer.step()
        norm = self.optimizer.get_grad_norm()
        if norm is None and self.clip is not None:
            raise RuntimeError(f"the step was skipped, which would look fast: overflow at a loss scale of {scale:g}")
        return float(loss.detach()), None if norm is None else float(norm) / scale

    def predicted(self) -> dict[str, float | None]:
        return {}

    def close(self) -> None:
        del self.model, self.optimizer


def _on_device(job: Job, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        model = decoder(*job.sizes, reentrant=True)
    model.half().to_empty(device=device)
    for name, parameter in model.named_parameters():
        fill(name, parameter, job.layers)
    return model


def prepare() -> None:
    """Compile what it would compile at the first start."""
    loader: Any = importlib.import_module("colossalai.kernel.kernel_loader")
    loader.CPUAdamLoader().load()
    loader.FusedOptimizerLoader().load()


build = Gemini
