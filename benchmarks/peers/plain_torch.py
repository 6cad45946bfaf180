"""Plain torch: bfloat16 parameters and gradients, float32 masters stepped by fused AdamW, under DDP on several ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.zero_offload.decoder import count, fill, skeleton
from benchmarks.zero_offload.job import Job, gpu_or_cpu

_BUCKET_BYTES = 2**30  # of float32 gradients that live at a time: 16 bytes a parameter, and one bucket


class PlainTorch:
    """See :class:`benchmarks.zero_offload.job.Trainer`."""

    def __init__(self, job: Job) -> None:
        rank = int(os.environ["LOCAL_RANK"])
        self.device, self.clip = gpu_or_cpu(rank), job.clip
        self.model: nn.Module = skeleton(*job.sizes).to_empty(device=self.device)
        for name, parameter in self.model.named_parameters():
            fill(name, parameter, job.layers)
        self.model.to(torch.bfloat16)
        self.parameters = count(self.model)
        self.flags: dict[str, Any] = {
            "optimizer": "AdamW(fused=True) on float32 masters, gradients cast a GiB at a time",
            "model": "bfloat16",
        }
        self.buckets = [_Bucket(part, job.lr) for part in _parts(list(self.model.parameters()))]
        if job.ranks > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
            settings = {"gradient_as_bucket_view": True, "static_graph": True, **job.flags}
            self.flags["DistributedDataParallel"] = settings
            ids = [self.device] if self.device.type == "cuda" else None
            self.model = DistributedDataParallel(_Loss(self.model), device_ids=ids, **settings)

    def step(self, ids: Tensor) -> tuple[float, float | None]:
        found = self.model(ids, ids)
        loss: Tensor = found if isinstance(found, Tensor) else found.loss
        loss.backward()
        gradients = [p.grad for bucket in self.buckets for p in bucket.parameters if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients, 2, torch.float32)).norm()
        factor = torch.ones_like(norm) if self.clip is None else (self.clip / (norm + 1e-6)).clamp(max=1.0)
        reduced = isinstance(self.model, DistributedDataParallel)  # then gradients are views of what is sent
        for bucket in self.buckets:
            bucket.step(factor, keep=reduced)
        self.model.zero_grad(set_to_none=not reduced)
        return float(loss.detach()), float(norm)

    def predicted(self) -> dict[str, float | None]:
        return {}

    def close(self) -> None:
        self.buckets.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


class _Loss(nn.Module):
    """A decoder that gives its loss alone: DDP looks for tensors in what a module gives, not in its attributes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, labels).loss
        return loss


class _Bucket:
    """Parameters that are stepped together."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        self.parameters = parameters
        self.masters = [nn.Parameter(p.detach().float()) for p in parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, fused=True)

    @torch.no_grad()
    def step(self, factor: Tensor, *, keep: bool) -> None:
        """With gradients times a factor; ``keep``: leave the memory of the parameters' gradients where it is."""
        gradients = []
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None  # every one is used
            master.grad = parameter.grad.float()
            gradients.append(master.grad)
        torch._foreach_mul_(gradients, factor)
        self.optimizer.step()
        torch._foreach_copy_([*self.parameters], [*self.masters])
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None
            if not keep:
                parameter.grad = None


def _parts(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if found[-1] and size + 4 * parameter.numel() > _BUCKET_BYTES:
            found.append([])
            size = 0
        found[-1].append(parameter)
        size += 4 * parameter.numel()
    return found


build = PlainTorch
