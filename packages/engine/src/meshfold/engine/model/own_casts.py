"""Layers that a model's own forward casts, as ``self.classifier = self.classifier.to(torch.float32)``.

The router of Switch Transformers in transformers does. ``Module.to`` would change the dtype of weights that the engine trains, in
the middle of a step: their gradients, chunks and stages have the engine's dtype. So the weights stay as they are, and the layer
multiplies in the dtype of its input with a copy of them.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def keep_dtypes(model: nn.Module) -> None:
    """Let the linear layers that a module's own forward assigns to itself again keep the dtype of their weights."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # its class has no forward
            continue
        for name in _assigned(type(module).forward):
            layer = module._modules.get(name)
            if type(layer) is nn.Linear and "forward" not in layer.__dict__:
                layer.to = partial(_to, layer)  # type: ignore[method-assign]
                layer.forward = partial(_multiply, layer)  # type: ignore[method-assign]


@lru_cache(maxsize=256)  # a model's layers share a few forwards
def _assigned(forward: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of attributes that a forward assigns."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return ()
    return tuple(dict.fromkeys(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"))


def _to(layer: nn.Linear, *args: Any, **kwargs: Any) -> nn.Linear:
    """Do as ``Module.to``, but for a dtype alone nothing."""
    given = (*args, *kwargs.values())
    if len(given) == 1 and isinstance(given[0], torch.dtype):
        return layer
    return nn.Linear.to(layer, *args, **kwargs)


def _multiply(layer: nn.Linear, x: Tensor) -> Tensor:
    bias = layer.bias
    return F.linear(x, layer.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
