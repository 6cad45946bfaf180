"""A module's forward replaced by another, and put back."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from meshfold.kernels import dispatch


class Replaced(Protocol):
    """A replacement in one module.

    Attributes:
        name: of the module in its model.
    """

    name: str

    def close(self) -> None:
        """Undo the replacement."""


class ReplacedForward:
    """A forward that replaces a module's own, or another replacement, as an attribute of that one module."""

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Args:
        name: of the module.
        module: called through ``forward`` from now on.
        forward: takes the arguments of the module's own forward, without ``self``.
        """
        self.name = name
        self._module, self._forward, self._before = module, forward, module.__dict__.get("forward")
        module.forward = forward

    def close(self) -> None:
        """Restore the module's former forward, unless this one has been replaced."""
        if self._module.__dict__.get("forward") is not self._forward:
            return
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before


def own_forward(module: nn.Module) -> bool:
    """Return True if a call of a module runs its class's forward, neither replaced nor compiled."""
    return "forward" not in module.__dict__ and not is_compiled(module)


def is_ours(hook: Callable[..., Any]) -> bool:
    """Return True for a hook that a package of ours has registered."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("meshfold.")


def is_compiled(module: nn.Module) -> bool:
    """Return True if torch.compile was applied to a module: to its call, its forward or the module itself."""
    if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    forward: Any = module.__dict__.get("forward")
    while forward is not None:
        if hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def names_of(forward: object) -> Mapping[str, Any]:
    """Return the global names that a forward's code uses, with their values; none for a forward that a decorator has wrapped.

    A decorator's names differ from the names of the forward inside.
    """
    if not isinstance(forward, types.FunctionType) or hasattr(forward, "__wrapped__"):
        return {}
    known = forward.__globals__
    return {name: known[name] for name in forward.__code__.co_names if name in known}


def with_names(forward: Callable[..., Any], bound: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a copy of a function in which some global names have other values. The function itself does not change."""
    own = forward
    if not isinstance(own, types.FunctionType):
        raise TypeError(f"{forward!r} is not a Python function, so its code cannot be copied")
    made = types.FunctionType(
        own.__code__, {**own.__globals__, **bound}, own.__name__, own.__defaults__, own.__closure__
    )
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model with their names, each once, without compiled modules and their children."""
    stack, seen = [("", model)], {model}
    while stack:
        name, module = stack.pop()
        if is_compiled(module):
            continue
        yield name, module
        children = [(leaf, child) for leaf, child in module.named_children() if child not in seen]
        seen.update(child for _, child in children)
        stack += [(f"{name}.{leaf}" if name else leaf, child) for leaf, child in reversed(children)]


def settings_of(module: nn.Module) -> tuple[object, ...]:
    """Return a module's class and its own words, flags and fractions: modules with the same ones are tried once.

    Modules of one class may compute different things, such as a norm over the first or the last dim. Integers are left out:
    they are mostly the number of a layer.
    """
    kinds = (bool, str, float, type(None))
    said = ((name, value) for name, value in vars(module).items() if type(value) in kinds and name != "training")
    return (type(module), *sorted(said, key=lambda pair: pair[0]))


class Watcher(Protocol):
    """A dispatch mode that needs the model's own operations, such as one that checks their layouts."""

    wants_own_operations: bool

    @property
    def is_off(self) -> bool:
        """True while it looks at no operations."""

    def layout_later(self, head: nn.Module, x: Tensor, shape: tuple[int, ...]) -> tuple[Any, ...] | None:
        """Return how the logits of a shape lie that a head will make of ``x``; None: they must not wait for their loss."""

    def moves_rows(self, x: Tensor, layout: tuple[Any, ...]) -> bool:
        """Return True if logits of ``x`` with a layout of :meth:`layout_later` have other rows than ``x`` on the same rank."""

    def logits_of(self, rows: Tensor, words: int, run: Callable[[], Tensor]) -> Tensor:
        """Return the logits ``... v`` that ``run`` computes of rows ``... k``."""

    def gathered_later(self, head: nn.Module, x: Tensor, numbers: Tensor, layout: tuple[Any, ...]) -> None:
        """Note the numbers ``... 1`` of the rows that a head gathers or moves, for logits of ``x`` with a layout."""

    def loss_of(
        self, rows: Tensor, target: Tensor, kept: int | None, run: Callable[[], Tensor], parts: Tensor | None = None
    ) -> Tensor:
        """Return the loss that ``run`` computes of rows ``m k`` and targets ``m``.

        Args:
            rows, target: the operands; rows that a head gathers or moves are given by their numbers, ``m 1``.
            kept: None for a sum over rows; else the number of results of a row, stacked in front of them (0: not stacked).
            run: computes the loss.
            parts: the numbers of all rows that the head gathers.
        """


def watcher() -> Watcher | None:
    """Return the innermost active mode that needs the model's own operations; None without one.

    It says so with an attribute ``wants_own_operations``.
    """
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if getattr(mode, "wants_own_operations", False):
            return cast(Watcher, mode)
    return None


def is_watched() -> bool:
    """Return True while a mode is active that needs the model's own operations."""
    return watcher() is not None


def runs_fused(x: Tensor, always: bool) -> bool:
    """Return True if a kernel pays off for a tensor: on a GPU or where it is counted as there, or on any device with ``always``.

    Never under torch.compile, which fuses the model's own operations with their neighbours.
    """
    return (dispatch.on_gpu(x) or always) and not torch.compiler.is_compiling() and not is_watched()
