"""A model's buffers and caches as they were, after forwards that are no part of the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Inside, forwards change copies of the buffers: running statistics of norms, counters.

    And attention adds nothing to its ``kv_cache``, the keys and values of the text that is being generated.
    """
    before = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for module, name, buffer in before:
        copy = buffer.clone()
        copy.__dict__.update(buffer.__dict__)  # where it lies on the mesh
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
