"""A forward in float32 of a model whose weights are narrower: what its log-probs would be without the rounding of activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.kernels import packed_weight_of


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Context manager: each module computes with its own weights in float32, which it has only during its call.

    Packed weights are decoded to float32.
    """
    kept: dict[nn.Module, dict[str, nn.Parameter]] = {}
    decoded: dict[nn.Module, torch.dtype] = {}

    def widen(module: nn.Module, *_: Any) -> None:
        if packed_weight_of(module) is not None and module not in decoded:
            decoded[module] = module.__dict__["weight_dtype"]
            module.__dict__["weight_dtype"] = torch.float32
        if module in kept:
            return
        narrow = {
            n: p for n, p in module._parameters.items() if p is not None and p.dtype in (torch.bfloat16, torch.float16)
        }
        kept[module] = narrow
        for name, parameter in narrow.items():
            # Not by parameter.data: an engine that stores the weights takes no other dtype.
            module._parameters[name] = nn.Parameter(parameter.detach().float(), requires_grad=False)
            module._parameters[name].__dict__.update(parameter.__dict__)

    def restore(module: nn.Module, *_: Any) -> None:
        module._parameters.update(kept.pop(module, {}))
        if module in decoded:
            module.__dict__["weight_dtype"] = decoded.pop(module)

    hooks = [module.register_forward_pre_hook(widen) for module in model.modules()]
    hooks += [module.register_forward_hook(restore, always_call=True) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def logprobs_of(model: nn.Module, prompt: list[int], new: list[int]) -> Tensor:
    """Return the log-probs of tokens behind a prompt by one forward, float32 ``new``; ranks that share the model all call."""
    device = next(model.parameters()).device
    text = torch.tensor([prompt + new], device=device)
    logits = model.eval()(text).logits[0, len(prompt) - 1 : -1].float()
    found: Tensor = logits.log_softmax(-1).gather(1, text[0, len(prompt) :, None])[:, 0]
    return found
