"""Memory that the planner foretells for ours, before a rank is started."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def spec_of(ranks: int, stage: int) -> dict[str, Any]:
    """Return the spec of ours: experts over all ranks, everything on the GPU."""
    return dict(data=ranks, expert=dict(size=ranks), zero=dict(stage=stage, placement="cuda"))


def stage_of(name: str) -> int:
    """Return the stage of ``zero`` that a contestant of ours names; 3 by default.

    >>> stage_of("ours, stage 1"), stage_of("ours, compiled")
    (1, 3)
    """
    _, _, stage = name.partition("stage ")
    return int(stage[:1]) if stage else 3


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
        spec_of(work["ranks"], stage_of(name)),
        batch_size=work["rows"],
        seq_len=work["length"],
        precision="bf16" if work["dtype"] == "bfloat16" else "fp32",
        recompute="blocks" if work["recompute"] == "blocks" else None,
    )
    return int(memory.total)
