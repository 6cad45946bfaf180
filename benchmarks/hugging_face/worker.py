"""One contestant trains a model of transformers for a while, in processes of its own; rank 0 writes JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks.hugging_face import offloaded
from benchmarks.peers.sharded import clipped_step

Step = Callable[[], Tensor]


def model_of(job: dict[str, Any]) -> nn.Module:
    """Return the model, with the same weights for every contestant."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**job["model"], max_position_embeddings=job["length"], use_cache=False)
    config._attn_implementation = "sdpa"
    dtype, device = getattr(torch, job["dtype"]), "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]
    finally:
        torch.set_default_dtype(torch.float32)


def peer(job: dict[str, Any], *, liger: bool, compiled: bool) -> Step:
    """Return the step of plain torch: float32 masters, fused AdamW, clipping by the norm, each layer recomputed."""
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    model = model_of(job).train()
    if job["recompute"] != "none":
        model.gradient_checkpointing_enable(dict(use_reentrant=False))  # type: ignore[operator]
    if compiled:
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.compile()
    return _step(model, model.parameters(), batch(job))


def _step(run: Callable[..., Any], weights: Iterable[Tensor], ids: Tensor, *, capturable: bool = False) -> Step:
    """Return the step of both plain contestants, which call ``run`` on the ids; ``capturable``: in a CUDA graph."""
    parameters = [*weights]
    masters = [p.detach().float().requires_grad_() for p in parameters]
    fused = torch.cuda.is_available()
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.01, fused=fused, capturable=capturable)

    def step() -> Tensor:
        loss: Tensor = run(input_ids=ids, labels=ids).loss
        loss.backward()
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        return loss.detach()

    return step


def graphed(job: dict[str, Any]) -> Step:
    """Return the step of plain torch with the whole step, forward to weights, captured in one CUDA graph.

    The model is compiled as a whole first. On a CPU nothing is captured.
    """
    model = model_of(job).train()
    on_gpu = torch.cuda.is_available()
    step = _step(torch.compile(model), model.parameters(), batch(job), capturable=on_gpu)
    if not on_gpu:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay(_kept: object = step) -> Tensor:
        """Replay on the tensors of ``step``, which live as long as this function."""
        graph.replay()
        return loss.clone()

    return replay


def fsdp2(job: dict[str, Any], *, liger: bool, compiled: bool) -> Step:
    """Return the step of torch's FSDP2: each layer a group, sums in float32, weights gathered again in backward."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = model_of(job).float().train()
    if job["recompute"] != "none":
        model.gradient_checkpointing_enable(dict(use_reentrant=False))  # type: ignore[operator]
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, job["dtype"]), reduce_dtype=torch.float32)
    for layer in model.model.layers:  # type: ignore[union-attr]
        if compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=torch.cuda.is_available())
    return clipped_step(model, optimizer, batch(job))


def ours(
    job: dict[str, Any], *, split: bool = True, sharded: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> Step:
    """Return the step of Meshfold.

    Args:
        job: what is trained.
        split: ZeRO; without it each rank holds the whole state, as a small model's does.
        sharded: more words of ``zero``, where everything is on the device.
        settings: of the engine.
    """
    from benchmarks.memory_plans import settle
    from meshfold.engine import Engine

    recompute = None if job["recompute"] == "none" else job["recompute"]
    zero: dict[str, Any] = dict(stage=3, placement="cuda", **sharded)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if job["recompute"] == "auto" or job["gpu_memory"]:
        limits = dict(gpu_memory_limit=job["gpu_memory"], host_memory_limit=job["host_memory"])
        zero = dict(placement="auto", **{name: limit for name, limit in limits.items() if limit})
    engine = Engine(
        model_of(job),
        dict(data=ranks, zero=zero) if split else dict(data=ranks),
        precision="bf16" if job["dtype"] == "bfloat16" else "fp32",
        clip_grad_norm=1.0,
        optimizer=dict(name="adamw", lr=1e-4, weight_decay=0.01),
        recompute=recompute,
        **settings,
    )
    if engine.fused_kernels is not None:
        print(engine.fused_kernels, file=sys.stderr)
    ids = batch(job)
    settle(job, engine)

    def step() -> Tensor:
        engine.run_step(dict(input_ids=ids, labels=ids))
        return engine.runner.loss

    return step


def batch(job: dict[str, Any]) -> Tensor:
    """Return this rank's part of the token ids ``rows length``."""
    ids = torch.randint(
        job["model"]["vocab_size"], (job["rows"], job["length"]), generator=torch.Generator().manual_seed(1)
    )
    ids = ids.chunk(int(os.environ.get("WORLD_SIZE", "1")))[int(os.environ.get("RANK", "0"))]
    return ids.cuda() if torch.cuda.is_available() else ids


KEPT_WHOLE: dict[str, Any] = dict(reshard_after_forward=False)

CONTESTANTS: dict[str, Callable[[dict[str, Any]], Step]] = {
    "torch": lambda job: peer(job, liger=False, compiled=False),
    "torch, compiled": lambda job: peer(job, liger=False, compiled=True),
    "torch, compiled, one CUDA graph": lambda job: graphed(job),
    "Liger": lambda job: peer(job, liger=True, compiled=False),
    "Liger, compiled": lambda job: peer(job, liger=True, compiled=True),
    "FSDP2": lambda job: fsdp2(job, liger=False, compiled=False),
    "FSDP2, compiled": lambda job: fsdp2(job, liger=False, compiled=True),
    "FSDP2, Liger": lambda job: fsdp2(job, liger=True, compiled=False),
    "FSDP2, Liger, compiled": lambda job: fsdp2(job, liger=True, compiled=True),
    "DeepSpeed ZeRO-3 offload": lambda job: offloaded.deepspeed(job, model_of(job).train(), batch(job)),
    "FSDP2 offload": lambda job: offloaded.fsdp2(job, model_of(job).train(), batch(job)),
    "ours": lambda job: ours(job),
    "ours, kernels off": lambda job: ours(job, kernels="off"),
    "ours, compiled": lambda job: ours(job, compile=True),
    "ours, pushed": lambda job: ours(job, sharded=dict(transport="push")),
    "ours, kept whole": lambda job: ours(job, sharded=KEPT_WHOLE),
    "ours, kept whole, pushed": lambda job: ours(job, sharded=dict(**KEPT_WHOLE, transport="push")),
    "ours, kept whole, pushed, compiled": lambda job: ours(
        job, sharded=dict(**KEPT_WHOLE, transport="push"), compile=True
    ),
    "ours, whole": lambda job: ours(job, split=False),
    "ours, whole, compiled": lambda job: ours(job, split=False, compile=True),
    "ours, whole, one CUDA graph": lambda job: ours(job, split=False, cuda_graph=True),
    "ours, whole, compiled, one CUDA graph": lambda job: ours(job, split=False, compile=True, cuda_graph=True),
}


if __name__ == "__main__":
    from benchmarks.timed_training import train_or_absent

    job = json.loads(sys.argv[1])
    train_or_absent(job, CONTESTANTS[job["contestant"]])
