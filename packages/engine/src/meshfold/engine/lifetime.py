"""The end of an engine: what is open is closed once, and later calls say so."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn, Protocol, SupportsIndex, TypeVar

from meshfold.engine.checkpoints.saving import Saver
from meshfold.engine.errors import TrainingError
from meshfold.engine.states.accumulation import Accumulation


class Lifetime:
    """All that an engine has opened, until its end.

    Attributes:
        is_over: the engine is closed.
    """

    def __init__(self, opened: ExitStack, saver: Saver, gradients: Accumulation) -> None:
        """Args:
        opened: closes all that was opened while the engine was built.
        saver: background saves, which must end first.
        gradients: of the model, whose hooks go.
        """
        self._opened, self._saver, self._gradients = opened, saver, gradients
        self.is_over = False

    def end(self) -> None:
        """Wait for a save in progress, and close all; do nothing if that was done.

        Raises:
            CheckpointError: on all ranks, if the save failed on one of them; everything is closed nevertheless.
        """
        if self.is_over:
            return
        self.is_over = True
        try:
            if sys.exc_info()[0] is None:
                self._saver.finish()
            else:  # the other ranks may not get here
                self._saver.abandon()
        finally:
            self._gradients.close()
            self._opened.close()


class HasLifetime(Protocol):
    """An object with an end."""

    lifetime: Lifetime


T = TypeVar("T", bound=HasLifetime)
_AFTERWARDS = ("close", "print")
_SPECIAL = ("__call__", "__enter__")


def refuse_after_close(kind: type[T]) -> type[T]:
    """Decorate a class: after ``close`` public methods but ``print`` raise a TrainingError, attributes stay; copies raise."""
    for name, method in list(vars(kind).items()):
        is_public = not name.startswith("_") or name in _SPECIAL
        if is_public and name not in _AFTERWARDS and inspect.isfunction(method):
            setattr(kind, name, _while_open(method))
    kind.__reduce_ex__ = _refuse_pickle  # type: ignore[method-assign]
    return kind


def _while_open(method: Callable[..., Any]) -> Callable[..., Any]:
    name = {"__call__": "(...)", "__enter__": " in a with statement"}.get(method.__name__, f".{method.__name__}(...)")

    @functools.wraps(method)
    def called(self: HasLifetime, *args: Any, **kwargs: Any) -> Any:
        if self.lifetime.is_over:
            raise TrainingError(
                f"engine{name}: this engine is closed. Call it before close(), which the end of `with Engine(...) as engine:` "
                "calls too, or make another Engine"
            )
        return method(self, *args, **kwargs)

    return called


def _refuse_pickle(engine: object, protocol: SupportsIndex) -> NoReturn:
    """Refuse to copy or pickle an engine: its process groups, hooks and background saves belong to this process.

    Raises:
        TrainingError: always.
    """
    raise TrainingError(
        "an engine cannot be copied or pickled: write engine.save(folder) on every rank, and load(folder) into another engine; "
        "engine.full_state_dict() has the weights"
    )
