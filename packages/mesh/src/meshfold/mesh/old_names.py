"""Old names of attributes and arguments: they work, with a DeprecationWarning that gives the current name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


def with_old_arguments(
    arguments: Mapping[str, str], name: str | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that lets a function's keyword arguments be given under old names.

    Args:
        arguments: old name of a keyword argument: its name today.
        name: of the function in the warning; None: its own.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        called = name or function.__name__

        @functools.wraps(function)
        def renamed(*args: P.args, **options: P.kwargs) -> T:
            for old in arguments.keys() & options.keys():
                message = f"{called}({old}=...) is now {called}({arguments[old]}=...)"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                options[arguments[old]] = options.pop(old)
            return function(*args, **options)

        return renamed

    return decorate


def with_old_names(
    names: Mapping[str, str], arguments: Mapping[str, str] = MappingProxyType({})
) -> Callable[[type[T]], type[T]]:
    """Return a decorator that lets a class's attributes and arguments be used under old names.

    Args:
        names: old name of an attribute: its name today.
        arguments: old name of a keyword argument of the constructor: its name today.
    """

    def renamed(cls: type[T], old: str, new: str) -> property:
        def warn() -> None:
            message = f"{cls.__name__}.{old} is now {cls.__name__}.{new}"
            warnings.warn(message, DeprecationWarning, stacklevel=3)

        def read(self: T) -> Any:
            warn()
            return getattr(self, new)

        def write(self: T, value: Any) -> None:
            warn()
            setattr(self, new, value)

        return property(read, write)

    def decorate(cls: type[T]) -> type[T]:
        if arguments:
            construct: Callable[..., None] = cls.__init__
            cls.__init__ = with_old_arguments(arguments, cls.__name__)(construct)  # type: ignore[method-assign]
        for old, new in names.items():
            setattr(cls, old, renamed(cls, old, new))
        return cls

    return decorate
