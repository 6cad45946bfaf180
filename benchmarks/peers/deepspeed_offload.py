"""DeepSpeed: ZeRO stage 3 with parameters and optimizer in host memory."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor

from benchmarks.zero_offload.decoder import decoder, fill
from benchmarks.zero_offload.job import Job, gpu_or_cpu, merged

_LAYER_AT_A_TIME = {
    "reduce_bucket_size": 200_000_000,
    "stage3_prefetch_bucket_size": 200_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
"""Buckets that hold a layer of 6.7B's, both ways"""


def settings_of(rows: int, *, lr: float, clip: float | None = 1.0, default_buckets: bool = False) -> dict[str, Any]:
    """Return DeepSpeed's settings: asynchronous, pinned, everything on the host.

    Args:
        rows: sequences a step, on each rank.
        lr: learning rate of AdamW.
        clip: largest norm of the gradient; None: not clipped.
        default_buckets: buckets of DeepSpeed's own sizes; else they hold a layer.
    """
    on_host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip or 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": dict(on_host),
            "offload_optimizer": dict(on_host),
            "overlap_comm": True,
            "contiguous_gradients": True,
            **({} if default_buckets else _LAYER_AT_A_TIME),
        },
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}},
        "steps_per_print": 10**9,
    }


def config(job: Job) -> dict[str, Any]:
    """Return DeepSpeed's settings for a job of :mod:`benchmarks.zero_offload`."""
    base = settings_of(job.rows, lr=job.lr, clip=job.clip, default_buckets=job.options.get("buckets") == "default")
    if "ratio" in job.options:  # this share of the optimizer on the host, the rest on the GPU
        base = merged(base, {"zero_optimization.offload_optimizer.ratio": job.options["ratio"]})
    return merged(base, job.flags)


class DeepSpeed:
    """See :class:`benchmarks.zero_offload.job.Trainer`."""

    def __init__(self, job: Job) -> None:
        deepspeed: Any = importlib.import_module("deepspeed")
        self.device = gpu_or_cpu(int(os.environ["LOCAL_RANK"]))
        self.flags = {"deepspeed": deepspeed.__version__, **config(job)}
        deepspeed.init_distributed()
        settings = config(job)
        with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
            model = decoder(*job.sizes, reentrant=job.options.get("reentrant", True))
        for place, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            with deepspeed.zero.GatheredParameters(list(own.values()), modifier_rank=0):
                for name, parameter in own.items():
                    fill(f"{place}.{name}", parameter, job.layers)
        self.parameters = sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())
        self.engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]

    def step(self, ids: Tensor) -> tuple[float, float | None]:
        loss = self.engine(ids, ids).loss
        self.engine.backward(loss)
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return float(loss.detach()), None if norm is None else float(norm)

    def predicted(self) -> dict[str, float | None]:
        return {}

    def close(self) -> None:
        self.engine.destroy()


def prepare() -> None:
    """Compile what it would compile at the first start."""
    builder: Any = importlib.import_module("deepspeed.ops.op_builder")
    builder.CPUAdamBuilder().load(verbose=False)


build = DeepSpeed
