"""Training steps of denoisers as diffusers' scripts have them: mixed precision, fused AdamW; alone or under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.sharded import adamw_step

BLOCKS = ("transformer_blocks", "single_transformer_blocks")


def alone(model: nn.Module, batch: Mapping[str, Tensor], low: torch.dtype, backend: str | None) -> Callable[[], Tensor]:
    """Return the step on one GPU: float32 weights under autocast, as accelerate trains them.

    Args:
        batch: arguments of the model, and ``target``.
        low: of autocast.
        backend: of torch.compile; None: not compiled.
    """
    called = model if backend is None else torch.compile(model, backend=backend)
    device = next(model.parameters()).device.type

    def forward() -> Tensor:
        with torch.autocast(device, low, enabled=low != torch.float32):
            output = called(**_given(batch)).sample
        return F.mse_loss(output.float(), batch["target"].float())

    return adamw_step(model, forward)


def fsdp2(
    model: nn.Module, batch: Mapping[str, Tensor], low: torch.dtype, backend: str | None, *, ranks: int, recompute: bool
) -> Callable[[], Tensor]:
    """Return the step under FSDP2: each block a group, float32 masters, gradients reduced in float32.

    Args:
        batch: this rank's rows.
        ranks: that share the model.
        recompute: every block, in backward.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = next(model.parameters()).device.type
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=True)
    settings: dict[str, Any] = dict(mesh=init_device_mesh(device, (ranks,)), mp_policy=policy)
    for name in BLOCKS:
        blocks: Any = getattr(model, name, ())
        embedder = getattr(getattr(blocks[0], "norm1", None), "emb", None) if len(blocks) else None
        if isinstance(embedder, nn.Module):  # DiT's output layer calls that of its first block
            fully_shard(embedder, **settings)
        for place, block in enumerate(blocks):
            if backend is not None:
                block.compile(backend=backend)
            wrapped = checkpoint_wrapper(block) if recompute else block
            blocks[place] = fully_shard(wrapped, **settings)
    fully_shard(model, **settings)

    def forward() -> Tensor:
        return F.mse_loss(model(**_given(batch)).sample.float(), batch["target"].float())

    return adamw_step(model, forward)


def _given(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "target"}
