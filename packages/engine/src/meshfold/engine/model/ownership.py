"""Ownership of a module by an engine: one engine trains it at a time, and it is restored if the engine cannot be built.

Each engine takes its parameters' gradients, and drops gradients of other losses. If two engines train one module, the later
would never see a gradient, and its loss would not change, without an error. Running a notebook cell twice makes two.
"""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from meshfold.mesh import SpecError
from meshfold.mesh.parameters import give, values_of


class Claim:
    """Mark that an engine trains a module, until the engine is closed or garbage collected."""

    def __init__(self, engine: object, *, in_chunks: bool) -> None:
        """Args:
        engine: trains it.
        in_chunks: its weights are in the engine's chunks, and are lost with it if it is not closed.
        """
        self._engine, self._in_chunks, self._closed = ref(engine), in_chunks, False

    @property
    def holds(self) -> bool:
        """Return True if no other engine may train the model."""
        return not self._closed and (self._in_chunks or self._engine() is not None)

    def close(self) -> None:
        """Release the module."""
        self._closed = True


_claims: WeakKeyDictionary[nn.Module, Claim] = WeakKeyDictionary()


def check_free(model: object) -> None:
    """Check a model before an engine takes it. A function always passes, since each call makes another model.

    Raises:
        SpecError: if another engine trains a part of it.
    """
    parts = dict(_trained(model)) if isinstance(model, nn.Module) else {}
    if any(_is_taken(module) for module in parts.values()):
        gc.collect()  # the owner may be an unreachable engine
    taken = [name for name, module in parts.items() if _is_taken(module)]
    if taken:
        what = "it" if len(taken) == len(parts) else f"its {taken[0]!r}"
        raise SpecError(
            f"model={type(model).__name__}(...): another engine already trains {what}, and this one would see none of its "
            "gradients. Call close() on the other engine first, or give this one its own model"
        )


def claim(model: nn.Module, engine: object, *, in_chunks: bool) -> Claim:
    """Mark a model and all that is trained in it as taken by a complete engine."""
    made = Claim(engine, in_chunks=in_chunks)
    _claims.update({module: made for _, module in _trained(model)})
    return made


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have trained parameters of their own, by name."""
    for name, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            yield name, module


def _is_taken(module: nn.Module) -> bool:
    return module in _claims and _claims[module].holds


_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


class AsGiven:
    """Context manager around the construction of an engine: restores a model if that fails.

    An engine splits a model, cuts it into stages and moves it in place, and later steps may still refuse it. So references to
    all parts of a model are kept until the engine is complete; nothing is copied, and weights that are removed from the model
    stay in memory until then.

    Modules, their classes, attributes and hooks, parameters and buffers are then the original objects, with their original
    memory. Writes into that memory are not undone: if ranks made a module with different weights, it keeps rank 0's.
    """

    def __init__(self, model: object) -> None:
        """Args:
        model: as passed; nothing is recorded for a function, which makes a new model every time.
        """
        modules = [*model.modules()] if isinstance(model, nn.Module) else []
        self._modules = [_Module(module) for module in modules]
        tensors = {t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}
        self._tensors = [_Tensor(tensor) for tensor in tensors]

    def forget(self) -> None:
        """Commit: keep the changed model, and drop the references to its former parts."""
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
    """Snapshot of a module's class and attributes, with the contents of containers."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._kind, self._attributes = module, type(module), dict(module.__dict__)
        self._inside = [(value, value.copy()) for value in self._attributes.values() if type(value) in _CONTAINERS]

    def put_back(self) -> None:
        if type(self._module) is not self._kind:
            self._module.__class__ = self._kind
        _refill(self._module.__dict__, self._attributes)
        for container, content in self._inside:
            _refill(container, content)


class _Tensor:
    """Snapshot of a parameter's or buffer's memory, gradient, hooks and attributes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._data, self._gradient = tensor, values_of(tensor), tensor.grad
        self._kind = type(tensor)
        self._trained, self._attributes = tensor.requires_grad, dict(tensor.__dict__)
        self._hooks = {name: dict(getattr(tensor, name) or {}) for name in _HOOKS}

    def put_back(self) -> None:
        tensor = self._tensor
        give(tensor, self._data)
        if tensor.__class__ is not self._kind:
            tensor.__class__ = self._kind
        tensor.grad = self._gradient
        if tensor.requires_grad is not self._trained:
            tensor.requires_grad_(self._trained)
        _refill(tensor.__dict__, self._attributes)
        for name, hooks in self._hooks.items():
            if getattr(tensor, name) is not None:  # autograd keeps the first dict: refill it, do not replace it
                _refill(getattr(tensor, name), hooks)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _refill(container: Any, content: Any) -> None:
    """Restore the contents of a dict, list or set, in order."""
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
