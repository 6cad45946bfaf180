"""When a forward is looked at: the first of each kind of call. All others run without any of this.

Calls are of one kind if the same arguments are given, of the same dtypes and numbers of dims, in the same state (training or
not, with gradients or not).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from meshfold.mesh.tracking.active import is_watched, part

if TYPE_CHECKING:
    from meshfold.mesh.tracking.follow import Tracker

_WATCH = "_meshfold_watch"


class Watched(Protocol):
    """Knowledge that a way of splitting a model has of it."""

    def begin(self, tracker: Tracker, model: nn.Module, given: Mapping[str, Any]) -> None:
        """A forward begins that is looked at, with these arguments by name or number."""

    def takes(self, module: nn.Module) -> bool:
        """Return whether a module's own code may communicate between ranks, so that it is not tracked."""

    def given(
        self, tracker: Tracker, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse arguments that such a module cannot take, before it runs."""

    def returned(
        self,
        tracker: Tracker,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        """Say how the results of such a module lie, before its own hooks run."""

    def remedy(self, name: str, axes: tuple[str, ...]) -> str:
        """Return what to write instead of code that mixes pieces over these axes, in a module of this name; empty if unknown."""


def watch(model: nn.Module, watched: Watched) -> Callable[[], None]:
    """Look at the first forward of each kind from now on.

    Returns:
        A function that undoes it.
    """
    found: Watch | None = model.__dict__.get(_WATCH)
    if found is None:
        found = model.__dict__[_WATCH] = Watch()
        found.attach(model)
    found.watched.append(watched)
    found.seen.clear()

    def undo() -> None:
        if watched in found.watched:
            found.watched.remove(watched)
            if not found.watched:
                found.remove()
                model.__dict__.pop(_WATCH, None)

    return undo


class Watch:
    """The hooks before and after a model's forward.

    Attributes:
        watched: who knows how the model is split.
        seen: the kinds of call that have been looked at.
    """

    def __init__(self) -> None:
        self.watched: list[Watched] = []
        self.seen: set[object] = set()
        self._handles: list[Any] = []
        self._looking: ExitStack | None = None
        self._kind: object = None

    def attach(self, model: nn.Module) -> None:
        """Register the hooks, before those that are there."""
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        kind = (
            part(),
            model.training,
            torch.is_grad_enabled(),
            tuple(map(_kind, args)),
            tuple((name, _kind(value)) for name, value in kwargs.items()),
        )
        if kind in self.seen or self._looking is not None or not is_watched() or _has_no_values(args, kwargs):
            return
        from meshfold.mesh.tracking.looking import Looking

        self._kind = kind
        given = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        self._looking = ExitStack()
        self._looking.enter_context(Looking(model, tuple(self.watched), given))

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._looking is None or torch.compiler.is_compiling():
            return
        looking, self._looking = self._looking, None
        looking.close()
        error = sys.exc_info()[1]
        if error is None or getattr(error, "ends_forward", False):
            self.seen.add(self._kind)


def _has_no_values(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether it is a plan's forward, which computes nothing."""
    return any(isinstance(value, Tensor) and value.is_meta for value in (*args, *kwargs.values()))


def _kind(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    if value is None or isinstance(value, bool | str):
        return value
    return type(value)
