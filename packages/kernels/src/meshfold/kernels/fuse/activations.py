"""Gated activations: ``silu(gate) * up`` or ``gelu(gate) * up``, where a module only ever multiplies its activation.

The activation may be a module of any name (``nn.SiLU``, Hugging Face's) or a call ``F.silu(...)`` or ``F.gelu(...)`` in the
forward's own code. GELU is the exact one, or as a module also its tanh approximation.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from meshfold.kernels.activations import geglu2, swiglu2
from meshfold.kernels.fp8_inputs import FP8_SOURCE
from meshfold.kernels.fuse.replaced import (
    ReplacedForward,
    candidates,
    names_of,
    own_forward,
    runs_fused,
    settings_of,
    with_names,
)

Activation = Callable[[Tensor], Tensor]
Product = Callable[..., Tensor]  # gate, up, and maybe a source -> product

_FUNCTIONS: tuple[tuple[Activation, Product], ...] = ((F.silu, swiglu2), (F.gelu, geglu2))
"""Each activation that a forward may call, with the kernel of its product."""
_FUSED: tuple[tuple[Activation, Product], ...] = (
    *_FUNCTIONS,
    (partial(F.gelu, approximate="tanh"), partial(geglu2, approximate="tanh")),
)
"""The same, with those that a module may compute."""


def fuse_gated(model: nn.Module, *, always: bool) -> list[ReplacedForward]:
    """Let every gated activation run as one kernel; see :func:`meshfold.kernels.fuse.fuse`."""
    tried: dict[Any, bool] = {}
    copies: dict[type, Callable[..., Any] | None] = {}
    found: dict[int, ReplacedForward] = {}
    for name, module in candidates(model):
        if not own_forward(module) or type(module).__module__.startswith(("torch.", "meshfold.")):
            continue
        kinds = {leaf: kind for leaf, child in module.named_children() if (kind := _gate_of(child))}
        if len(kinds) == 1:
            ((leaf, (own, product)),) = kinds.items()
            child = module.get_submodule(leaf)
            key = (settings_of(module), own)
            if key not in tried:
                tried[key] = _only_multiplies(module, type(module).forward, leaf)
            if tried[key] and id(child) not in found:
                path = f"{name}.{leaf}" if name else leaf
                found[id(child)] = ReplacedForward(path, child, partial(_activate, child, own, product, always))
        elif not kinds:
            if type(module) not in copies:
                copies[type(module)] = _with_lazy_function(module, always)
            forward = copies[type(module)]
            if forward is not None:
                found[id(module)] = ReplacedForward(name, module, types.MethodType(forward, module))
    return [*found.values()]


def _gate_of(module: nn.Module) -> tuple[Activation, Product] | None:
    """Return :func:`activation_of` a module of torch's or transformers' activations; None for any other module."""
    return activation_of(module) if "activation" in type(module).__module__ else None


@torch.no_grad()
def activation_of(module: nn.Module) -> tuple[Activation, Product] | None:
    """Return the activation that a module computes, and its gated product, found by trial; None for any other module."""
    if next(module.children(), None) is not None or not own_forward(module):
        return None
    if any(True for _ in module.parameters()) or getattr(module, "inplace", False):
        return None
    x = torch.linspace(-4.0, 4.0, 33)
    try:
        y = module(x)
    except Exception:  # takes other arguments
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    return next((each for each in _FUSED if torch.allclose(y, each[0](x), rtol=1e-6, atol=1e-7)), None)


def _activate(module: nn.Module | None, own: Activation, product: Product, always: bool, x: Tensor) -> Any:
    if not runs_fused(x, always):
        return own(x)
    source = None if module is None else module.__dict__.get(FP8_SOURCE)
    return LazyActivation(own, product if source is None else partial(product, source=source), x)


class LazyActivation:
    """An activation that is computed with the product it is a factor of. Any other use computes it at once."""

    __slots__ = ("_own", "_product", "_x")

    def __init__(self, own: Activation, product: Product, x: Tensor) -> None:
        self._own, self._product, self._x = own, product, x

    def __mul__(self, other: Any) -> Tensor:
        if type(other) is Tensor and other.shape == self._x.shape and other.dtype == self._x.dtype:
            return self._product(self._x, other)
        result: Tensor = self._value() * other
        return result

    __rmul__ = __mul__

    def _value(self) -> Tensor:
        return self._own(self._x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func in _PRODUCTS and len(args) == 2 and not given:
            one, other = args
            return one * other if isinstance(one, LazyActivation) else other * one
        args, given = tree_map_only(LazyActivation, lambda each: each._value(), (args, given))
        return func(*args, **given)


_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)


# Trials run a module's forward on a copy without weights, whose other children return their input.


class _Noted(LazyActivation):
    """Activation that records how its result is used."""

    __slots__ = ("products", "values")

    def __init__(self, own: Activation, product: Product, x: Tensor) -> None:
        super().__init__(own, product, x)
        self.products = self.values = 0

    def __mul__(self, other: Any) -> Tensor:
        self.products += 1
        return super().__mul__(other)

    __rmul__ = __mul__

    def _value(self) -> Tensor:
        self.values += 1
        return super()._value()


class _Notes(nn.Module):
    """Stand-in for the activation in a trial, as a module or as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[_Noted] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.append(_Noted(*_FUSED[0], x))
        return self.seen[-1]

    def only_multiplied(self) -> bool:
        """Return True if the activation was called once and its result was used once, in a product."""
        return len(self.seen) == 1 and self.seen[0].products == 1 and self.seen[0].values == 0


@torch.no_grad()
def _only_multiplies(module: nn.Module, forward: Callable[..., Any], leaf: str, notes: Any = None) -> bool:
    """Return True if a forward only multiplies its activation: the child ``leaf``, or the function that ``notes`` replaces."""
    notes = notes or _Notes()
    trial = copy.copy(module)
    trial.__dict__ = dict(module.__dict__)
    trial.__dict__["_modules"] = {
        name: notes if name == leaf else nn.Identity() for name, child in module._modules.items() if child
    }
    try:
        forward(trial, torch.randn(2, 3, 8))
    except Exception:  # needs its weights, or other inputs: unknown
        return False
    return bool(notes.only_multiplied())


class _Namespace:
    """View of a torch module in which one function, given by its path of names, is replaced."""

    def __init__(self, module: Any, path: tuple[str, ...], function: Callable[..., Any]) -> None:
        self._module, (self._name, *rest) = module, path
        self._found = _Namespace(getattr(module, path[0]), tuple(rest), function) if rest else function

    def __getattr__(self, name: str) -> Any:
        return self._found if name == self._name else getattr(self._module, name)


_PATHS: Mapping[Any, tuple[str, ...]] = {F: (), nn: ("functional",), torch: ("nn", "functional")}
"""Modules under whose names forwards call activations, with the path from each to torch.nn.functional."""


def _with_lazy_function(module: nn.Module, always: bool) -> Callable[..., Any] | None:
    """Return a forward in which ``F.silu`` or ``F.gelu`` is deferred to its product; None if it has no such call or other uses."""
    forward = type(module).forward
    for own, product in _FUNCTIONS:
        bind = _binding(forward, own)
        if bind is None:
            continue
        notes = _Notes()
        if _only_multiplies(module, with_names(forward, bind(notes)), "", notes):
            return with_names(forward, bind(partial(_activate, None, own, product, always)))
    return None


def _binding(forward: Callable[..., Any], own: Activation) -> Callable[[Any], dict[str, Any]] | None:
    """Return the globals with which a forward calls another function instead of ``own``; None if it does not call ``own``."""
    leaf = own.__name__
    bound: dict[str, tuple[str, ...]] = {}
    for name, value in names_of(forward).items():
        if value is own:
            bound[name] = ()
        elif isinstance(value, ModuleType) and value in _PATHS:
            path = (*_PATHS[value], leaf)
            if all(each in forward.__code__.co_names for each in path):
                bound[name] = path
    if not bound:
        return None
    own_names = forward.__globals__

    def bind(function: Any) -> dict[str, Any]:
        return {name: _Namespace(own_names[name], path, function) if path else function for name, path in bound.items()}

    return bind
