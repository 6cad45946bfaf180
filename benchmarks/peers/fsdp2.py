"""torch's FSDP2, each block a group, everything on the GPU, its blocks compiled or not."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.fsdp2_offload import LossAlone
from benchmarks.specs.work import Work
from benchmarks.zero_offload.job import gpu_or_cpu


class FSDP2:
    """See :class:`benchmarks.specs.worker.Trainer`."""

    def __init__(self, work: Work, *, compiled: bool, reshard: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from meshfold.mesh import build_on_meta, materialize

        args = work.args
        self.device = gpu_or_cpu(int(os.environ["LOCAL_RANK"]))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # The first weights are those that the engine draws: whole here for a moment, which is no part of what is timed.
        model, trace = build_on_meta(work.model)
        materialize(model, trace, seed=0, device=self.device)
        low = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.precision]
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (self.ranks,)),
            "reshard_after_forward": reshard,
            "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32),
        }
        for block in model.blocks:
            if compiled:
                block.compile()
            fully_shard(block, **options)
        self.model = LossAlone(model)
        fully_shard(self.model, **options)
        self.clip, self.micro_steps, self.reshard = args.clip, args.micro_steps, reshard
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, fused=True)
        self.rates = work.rates(self.optimizer)
        self.flags = {
            "MixedPrecisionPolicy": {"param_dtype": str(low), "reduce_dtype": "torch.float32"},
            "reshard_after_forward": reshard,
            "compiled blocks": compiled,
            "optimizer": "AdamW(fused=True)",
        }

    def prepare(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.ranks)[self.rank].to(self.device)

    def step(self, ids: Tensor) -> float:
        total = torch.zeros((), device=self.device)
        for number, rows in enumerate(ids.chunk(self.micro_steps), 1):
            # Gradients are summed over the ranks in each micro-step: whole ones in float32 do not fit.
            self.model.set_reshard_after_backward(self.reshard or number == self.micro_steps)  # type: ignore[operator]
            loss = self.model(rows) / self.micro_steps
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.rates.step()
        self.optimizer.zero_grad()
        mean = total / self.ranks  # every rank has as many tokens
        dist.all_reduce(mean)
        return float(mean)

    def close(self) -> None:
        dist.destroy_process_group()
