"""A model as it was given, should an engine of it be refused after all.

An engine splits a model, cuts it into stages and moves it in place, and what comes later may still refuse it: a pipeline what
tensor parallelism has split, an optimizer what both have left. So what a model consists of is noted before the first change and
put back behind the last, wherever that came from. Nothing is copied: what is noted are references. The weights that a change takes
out of the model stay in memory until it is certain that the engine stands.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


class AsGiven:
    """Around the building of an engine: puts a model back if that ends in an error.

    Modules, their classes, attributes and hooks, parameters and buffers are then the objects that they were, on the memory that
    they had. What was written into that memory stays: of a module that ranks made with different weights, rank 0's.
    """

    def __init__(self, model: object) -> None:
        """Args:
        model: what was given; of a function, which makes another model every time, nothing is noted.
        """
        modules = [*model.modules()] if isinstance(model, nn.Module) else []
        self._modules = [_Module(module) for module in modules]
        tensors = {
            t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None
        }
        self._tensors = [_Tensor(tensor) for tensor in tensors]

    def forget(self) -> None:
        """Nothing can be refused any more: leave the model as it is from now on, and let go of what it had."""
        self._modules.clear()
        self._tensors.clear()

    def __enter__(self) -> AsGiven:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            for module in self._modules:
                module.put_back()
            for tensor in self._tensors:
                tensor.put_back()
        self.forget()


class _Module:
    """A module's class and attributes, with what is in those that are containers."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._kind, self._attributes = module, type(module), dict(module.__dict__)
        self._inside = [
            (value, value.copy()) for value in self._attributes.values() if type(value) in _CONTAINERS
        ]

    def put_back(self) -> None:
        if type(self._module) is not self._kind:
            self._module.__class__ = self._kind
        _refill(self._module.__dict__, self._attributes)
        for container, content in self._inside:
            _refill(container, content)


class _Tensor:
    """A parameter's or buffer's memory, gradient, hooks and attributes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._data, self._gradient = tensor, tensor.data, tensor.grad
        self._trained, self._attributes = tensor.requires_grad, dict(tensor.__dict__)
        self._hooks = {name: dict(getattr(tensor, name) or {}) for name in _HOOKS}

    def put_back(self) -> None:
        tensor = self._tensor
        tensor.data = self._data
        tensor.grad = self._gradient
        if tensor.requires_grad is not self._trained:
            tensor.requires_grad_(self._trained)
        _refill(tensor.__dict__, self._attributes)
        for name, hooks in self._hooks.items():
            if (
                getattr(tensor, name) is not None
            ):  # a dict that autograd has: to set another leaves it the first
                _refill(getattr(tensor, name), hooks)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _refill(container: Any, content: Any) -> None:
    """Give a dict, list or set the content it had, in the order it had."""
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
