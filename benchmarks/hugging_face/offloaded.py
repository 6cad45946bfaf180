"""Peers that keep parameters and optimizer of an unmodified model of transformers in host memory.

No limit of GPU memory holds for them: the table says what they took.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import absent
from benchmarks.peers.deepspeed_offload import settings_of
from benchmarks.peers.sharded import clipped_step
from benchmarks.timed_training import Step


def deepspeed(job: dict[str, Any], model: nn.Module, ids: Tensor) -> Step:
    """Return the step of DeepSpeed's ZeRO-3 with everything on the host.

    Args:
        job: what is trained.
        model: whole, in the dtype that it trains in; its parameters become shards.
        ids: this rank's ``rows length``.

    Raises:
        AbsentError: without DeepSpeed, or for another dtype than bfloat16.
    """
    library = absent.deepspeed()
    if job["dtype"] != "bfloat16":
        raise absent.AbsentError(f"DeepSpeed keeps masters beside weights in bfloat16; this work is in {job['dtype']}")
    _take_all_cores()
    library.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    model.gradient_checkpointing_enable(dict(use_reentrant=False))  # type: ignore[operator]
    engine = library.initialize(
        model=model, model_parameters=list(model.parameters()), config=settings_of(len(ids), lr=1e-4)
    )[0]

    def step() -> Tensor:
        loss: Tensor = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def fsdp2(job: dict[str, Any], model: nn.Module, ids: Tensor) -> Step:
    """Return the step of torch's FSDP2 with ``CPUOffloadPolicy``: float32 masters in pinned memory, fused AdamW on the CPU.

    Args:
        job: what is trained.
        model: whole, in the dtype that it trains in.
        ids: this rank's ``rows length``.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _take_all_cores()
    on_gpu, dtype = torch.cuda.is_available(), getattr(torch, job["dtype"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    model.gradient_checkpointing_enable(dict(use_reentrant=False))  # type: ignore[operator]
    # One rank has nothing to sum, and bfloat16 halves what goes to the host.
    summed = dtype if dist.get_world_size() == 1 else torch.float32
    settings: dict[str, Any] = dict(mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=summed))
    if on_gpu:
        settings |= dict(offload_policy=CPUOffloadPolicy(pin_memory=True))
    model = model.cpu().float()
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    if on_gpu:  # buffers are no parameters: FSDP2 leaves them where they are
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.cuda())
    return clipped_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True), ids)


def _take_all_cores() -> None:
    """Let the optimizer on the CPU have this rank's part of all cores, whatever the environment says."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("WORLD_SIZE", "1"))))
