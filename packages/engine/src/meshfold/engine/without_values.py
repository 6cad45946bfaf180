"""Running a model's code on the meta device, and counting what it would keep and compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@dataclass
class Saved:
    """Bytes of the storages that autograd keeps."""

    bytes: int = 0


@contextmanager
def saved_for_backward(parameters: list[nn.Parameter]) -> Iterator[Saved]:
    """Count what is saved for backward: each storage once, parameters left out."""
    seen = {parameter.untyped_storage()._cdata for parameter in parameters}
    kept: list[torch.UntypedStorage] = []  # an address must stay its own while others are counted
    found = Saved()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            kept.append(storage)
            found.bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


class _Attention(torch.autograd.Function):
    """Attention without values that keeps what flash attention keeps: its inputs, its output, a number a row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``b n s d, b n' t d, b n' t e -> b n s e``"""
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the three inputs."""
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class WithoutValues(TorchFunctionMode):
    """Lets a model's code run on the meta device.

    ``scaled_dot_product_attention`` would keep all scores there; the one above takes its place. Code that looks
    whether something holds for all elements (a mask that masks nothing) is told yes, for any element no.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            if named["query"].is_meta:  # what tries a module out does so with values, and gets them
                return self._attention(named["query"], named["key"], named["value"])
        if func in (Tensor.__bool__, Tensor.item) and hasattr(args[0], "_holds"):
            return args[0]._holds
        if func is Tensor.__contains__ and args[0].is_meta:
            return False
        found = func(*args, **(kwargs or {}))
        if (
            func in (torch.all, Tensor.all, torch.any, Tensor.any)
            and isinstance(found, Tensor)
            and found.is_meta
        ):
            found._holds = func in (torch.all, Tensor.all)  # type: ignore[attr-defined]
        return found

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Two matmuls forward, five backward (one of them the scores again): 2 operations an element of each.
        batch_and_heads = q.shape[:-2].numel()
        self.attention_flops += (
            2 * batch_and_heads * q.shape[-2] * k.shape[-2] * (4 * q.shape[-1] + 3 * v.shape[-1])
        )
        found: Tensor = _Attention.apply(q, k, v)
        return found
