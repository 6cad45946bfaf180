"""transformers' own way to train a mixture over ranks: `DistributedConfig`, FSDP2 with expert parallel by all-to-all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.absent import AbsentError
from benchmarks.peers.sharded import adamw_step


def transformers_step(model: Any, ids: Tensor, ranks: int, *, experts: bool, recompute: bool) -> Callable[[], Tensor]:
    """Return the step of a model of transformers under its own FSDP2, in bfloat16 with float32 masters.

    Args:
        model: in the dtype of its compute; masters are float32.
        ids: this rank's rows.
        ranks: of FSDP2; with ``experts`` these also share the experts.
        experts: expert parallel too.
        recompute: every layer, in backward.

    Raises:
        AbsentError: for a transformers without expert parallel that ranks with batches of their own can share.
    """
    import transformers
    from transformers.distributed import DistributedConfig

    names = {field.name for field in fields(DistributedConfig)}
    if not {"ep_size", "fsdp_mixed_precision"} <= names:
        raise AbsentError(
            f"transformers {transformers.__version__} has no expert parallel by all-to-all: give --wheels of 5.23, with "
            "huggingface_hub 1.31"
        )
    narrow = model.dtype != torch.float32
    config = DistributedConfig(
        fsdp_size=ranks,
        fsdp_mixed_precision=narrow,
        **(dict(ep_size=ranks, ep_implementation="all_to_all") if experts else {}),
    )
    config, _, meshes = model.prepare_distribute_model(config)
    if recompute:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    parallel: nn.Module = model.maybe_distribute_model(model.float().train(), config, meshes)

    def forward() -> Tensor:
        loss: Tensor = parallel(input_ids=ids, labels=ids).loss
        return loss

    return adamw_step(parallel, forward)
