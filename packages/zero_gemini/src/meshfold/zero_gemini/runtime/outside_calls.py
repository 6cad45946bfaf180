"""Calls of a unit's submodules from outside the unit.

A model's forward may call ``self.blocks[0].norm.embedder(t)`` itself, as diffusers' DiT does. The unit that holds the submodule's
parameters is not entered then. Such a call counts as a call of the unit.

Compiled blocks share their code if they are alike, and torch.compile traces the hooks of submodules. Each submodule therefore has
the same two functions under the same key. In a graph they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshfold.zero_gemini.runtime.units import Unit

Before = Callable[[nn.Module, Any, Any], Any]
"""Hook with a module, its arguments and its keyword arguments: returns other ones, or None."""
After = Callable[[nn.Module, Any, Any], None]
"""Hook with a module, its arguments and its output."""

_KEY = -1  # of our hooks in each submodule; torch counts its own from 0
_AROUND = "_units_around"  # attribute of a submodule: OutsideCalls of the units that hold it
_OWN = "_outside_calls"  # attribute of a unit's module


@dataclass(frozen=True, eq=False)
class _Watch:
    """Hooks of one caller; ``calls`` runs them until ``remove``."""

    calls: OutsideCalls
    before: Before
    after: After

    def remove(self) -> None:
        self.calls.remove(self)


def watch_outside(unit: Unit, before: Before, after: After, *, prepend: bool = False) -> _Watch:
    """Call hooks around each call of one of a unit's submodules that is not made by the unit's own forward.

    Args:
        unit: whose parameters include all of the submodule's.
        before: called before the submodule's forward.
        after: called after it, unless it raised.
        prepend: call them before existing ones.

    Returns:
        An object with a method ``remove``.
    """
    calls = unit.module.__dict__.get(_OWN) or OutsideCalls(unit)
    watch = _Watch(calls, before, after)
    calls.add(watch, prepend=prepend)
    return watch


class OutsideCalls:
    """The hooks on a unit's submodules.

    Attributes:
        called: the submodule that is called from outside, while it runs.
    """

    def __init__(self, unit: Unit) -> None:
        """Args:
        unit: see :func:`watch_outside`.
        """
        self._unit = unit
        held = set(unit.parameters)
        self._inner = [
            module
            for module in unit.module.modules()
            if module is not unit.module and (mine := [*module.parameters()]) and held.issuperset(mine)
        ]
        self._watches: list[_Watch] = []
        self._handles: list[Any] = []
        self._running = 0  # forwards of the unit
        self.called: nn.Module | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> OutsideCalls:
        return self  # hooks are not copied with a module either

    @property
    def is_inside(self) -> bool:
        """True while the unit or one of its submodules runs: further calls are inside of that."""
        return self._running > 0 or self.called is not None

    def add(self, watch: _Watch, *, prepend: bool) -> None:
        """Call further hooks; the first ones put this object's hooks on the modules."""
        if not self._watches and self._inner:
            self._hook()
        self._watches.insert(0 if prepend else len(self._watches), watch)

    def remove(self, watch: _Watch) -> None:
        """Stop calling hooks."""
        if watch in self._watches:
            self._watches.remove(watch)
            if not self._watches and self._inner:
                self._unhook()

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record that a submodule's forward begins."""
        self.called = module
        changed = False
        for watch in self._watches:
            given = watch.before(module, args, kwargs)
            if given is not None:
                (args, kwargs), changed = given, True
        return (args, kwargs) if changed else None

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record its end. ``output`` is None if it raised: then backward does not reach it."""
        self.called = None
        if output is not None:
            for watch in self._watches:
                watch.after(module, args, output)

    def covers(self, module: nn.Module) -> bool:
        """Return True for the unit and its submodules: while one runs, further calls are inside of that."""
        return module is self._unit.module or module in self._inner

    def _hook(self) -> None:
        module = self._unit.module
        module.__dict__[_OWN] = self
        self._handles = [
            module.register_forward_pre_hook(torch.compiler.disable(self._enter), prepend=True),
            module.register_forward_hook(torch.compiler.disable(self._leave), always_call=True),
        ]
        for inner in self._inner:
            inner.__dict__.setdefault(_AROUND, []).append(self)
            inner._forward_pre_hooks[_KEY] = _before
            inner._forward_pre_hooks_with_kwargs[_KEY] = True
            inner._forward_hooks[_KEY] = _after
            inner._forward_hooks_always_called[_KEY] = True

    def _unhook(self) -> None:
        self._unit.module.__dict__.pop(_OWN, None)
        for handle in self._handles:
            handle.remove()
        for inner in self._inner:
            around = inner.__dict__.get(_AROUND, [])
            if self in around:
                around.remove(self)
            if not around:
                inner.__dict__.pop(_AROUND, None)
                hooks: list[dict[int, Any]] = [inner._forward_pre_hooks, inner._forward_pre_hooks_with_kwargs]
                for of_module in (*hooks, inner._forward_hooks, inner._forward_hooks_always_called):
                    of_module.pop(_KEY, None)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running -= 1


def _before(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Hook before the forward of every submodule of a unit."""
    if torch.compiler.is_compiling():
        return None
    around: list[OutsideCalls] = module.__dict__.get(_AROUND, [])
    if not around or any(calls.is_inside for calls in around):
        return None
    return around[0].begin(module, args, kwargs)


def _idle_within(module: nn.Module, caller: nn.Module) -> bool:
    """Return True if these hooks of a submodule need no call that another module makes: they have seen the caller's."""
    return all(calls.covers(caller) for calls in module.__dict__.get(_AROUND, ()))


_before.idle_within = _idle_within  # type: ignore[attr-defined]


def _after(module: nn.Module, args: Any, output: Any) -> None:
    """Hook after it, called if it raised too."""
    if torch.compiler.is_compiling():
        return
    for calls in module.__dict__.get(_AROUND, ()):
        if calls.called is module:
            calls.end(module, args, output)
            return


_after.idle_within = _idle_within  # type: ignore[attr-defined]
