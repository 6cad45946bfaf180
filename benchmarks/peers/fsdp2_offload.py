"""torch's FSDP2, each block a group, with ``CPUOffloadPolicy`` and fused AdamW on the CPU, or all of it on the GPU."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.zero_offload.decoder import count, fill, skeleton
from benchmarks.zero_offload.job import Job, gpu_or_cpu, merged


class LossAlone(nn.Module):
    """The model's loss as a tensor: FSDP2 gathers again, before backward, for the tensors that a forward returned."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.module(ids, ids).loss
        return loss


class FSDP2:
    """See :class:`benchmarks.zero_offload.job.Trainer`."""

    def __init__(self, job: Job) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        self.device = gpu_or_cpu(int(os.environ["LOCAL_RANK"]))
        gpu, offload = self.device.type == "cuda", bool(job.options["offload"])
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
        mesh = init_device_mesh(self.device.type, (job.ranks,))
        # With one rank there is nothing to sum, and bfloat16 halves what goes to the host.
        base = {"reduce_dtype": "bfloat16" if job.ranks == 1 else "float32", "pin_memory": gpu}
        settings = merged(base, job.flags)
        reduce = getattr(torch, settings["reduce_dtype"])
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce),
        }
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=settings["pin_memory"])
        decoder = skeleton(*job.sizes)
        self.parameters = count(decoder)
        for block in cast(nn.ModuleList, decoder.blocks):
            fully_shard(block, **options)
        self.model = LossAlone(decoder)
        fully_shard(self.model, **options)
        self.model.to_empty(device="cpu" if offload else self.device)
        for name, parameter in self.model.named_parameters():
            _fill(name, parameter, job.layers, self.device)
        self.clip = job.clip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=job.lr, fused=True)
        self.flags = {
            "CPUOffloadPolicy": {"pin_memory": settings["pin_memory"]} if offload else None,
            "MixedPrecisionPolicy": {"param_dtype": "bfloat16", "reduce_dtype": settings["reduce_dtype"]},
            "reshard_after_forward": True,
            "optimizer": f"AdamW(fused=True) on the {'CPU' if offload else 'GPU'}, float32",
        }

    def step(self, ids: Tensor) -> tuple[float, float | None]:
        loss = self.model(ids)
        loss.backward()
        clip = float("inf") if self.clip is None else self.clip
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return float(loss.detach()), float(whole)

    def predicted(self) -> dict[str, float | None]:
        return {}

    def close(self) -> None:
        dist.destroy_process_group()


@torch.no_grad()
def _fill(name: str, parameter: Any, layers: int, device: torch.device) -> None:
    """This rank's rows of one parameter, drawn where drawing is fast."""
    whole = torch.empty(parameter.shape, device=device)
    fill(name, whole, layers)
    mesh = parameter.device_mesh
    rows = whole.chunk(mesh.size())
    local: Tensor = parameter.to_local()
    if mesh.get_local_rank() < len(rows) and local.numel():
        local.copy_(rows[mesh.get_local_rank()])


build = FSDP2
