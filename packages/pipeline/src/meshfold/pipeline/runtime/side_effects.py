"""Context managers around trial forwards, which must leave a model's buffers, caches, random states and tables as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from meshfold.mesh import dropout_stream


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Context manager: forwards change copies of the buffers, such as running statistics of norms and counters.

    Attention adds nothing to its ``kv_cache``, the keys and values during generation.
    """
    before = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for module, name, buffer in before:
        copy = buffer.clone()
        copy.__dict__.update(buffer.__dict__)  # keeps its metadata, such as its placement
        module._buffers[name] = copy
    caches = [(m, m.__dict__["kv_cache"]) for m in model.modules() if m.__dict__.get("kv_cache") is not None]
    for module, _ in caches:
        module.__dict__["kv_cache"] = None
    try:
        yield
    finally:
        for module, cache in caches:
            module.__dict__["kv_cache"] = cache
        for module, name, buffer in before:
            module._buffers[name] = buffer


@contextmanager
def without_randomness(leaves: Sequence[Any]) -> Iterator[None]:
    """Preserve random states, and give dropout a separate stream."""
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(dropout_stream(0, 0))
        yield


@contextmanager
def unscaled_tables(model: nn.Module) -> Iterator[None]:
    """Keep tables with ``max_norm`` from rescaling rows that only a trial forward reads."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm]
    limits = [table.max_norm for table in tables]
    try:
        for table in tables:
            table.max_norm = None
        yield
    finally:
        for table, limit in zip(tables, limits, strict=True):
            table.max_norm = limit


class _KeptGraph:
    """Stands for torch's function of reentrant checkpoints."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Checkpoint a function without a backward of its own."""
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


@contextmanager
def without_reentrant_checkpoints() -> Iterator[None]:
    """Context manager: ``checkpoint(..., use_reentrant=True)`` works like ``use_reentrant=False``, which computes the same.

    A reentrant checkpoint runs its block without a graph, and decides before the call whether its output gets one. A received
    tensor that enters at the block would get no gradient.
    """
    theirs = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _KeptGraph  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = theirs  # type: ignore[misc]
