"""Memory that the planner foretells for ours, before a rank is started."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def spec_of(ranks: int, name: str) -> dict[str, Any]:
    """Return the spec of a contestant of ours, by its name: experts over all ranks, everything on the GPU.

    >>> spec_of(2, "ours, stage 1")["zero"]["stage"], spec_of(2, "ours, all_to_all")["expert"]
    (1, {'size': 2, 'exchange': 'all_to_all'})
    """
    _, _, stage = name.partition("stage ")
    expert: dict[str, Any] = dict(size=ranks)
    if name.endswith("all_to_all"):
        expert["exchange"] = "all_to_all"
    return dict(data=ranks, expert=expert, zero=dict(stage=int(stage[:1]) if stage else 3, placement="cuda"))


def model_of(model: dict[str, Any], length: int, dtype: str) -> nn.Module:
    """Return transformers' unmodified model on the default device, with weights of a seed."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**model, max_position_embeddings=length, use_cache=False)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return Qwen3MoeForCausalLM(config)  # type: ignore[no-any-return]
    finally:
        torch.set_default_dtype(before)


def planned_bytes(work: dict[str, Any], model: dict[str, Any], name: str) -> int:
    """Return the bytes that the planner foretells a rank of a contestant of ours to hold at most."""
    from meshfold.planner import plan_memory

    memory = plan_memory(
        lambda: model_of(model, work["length"], work["dtype"]),
        spec_of(work["ranks"], name),
        batch_size=work["rows"],
        seq_len=work["length"],
        precision="bf16" if work["dtype"] == "bfloat16" else "fp32",
        recompute="blocks" if work["recompute"] == "blocks" else None,
    )
    return int(memory.total)
