"""Names of version 0.1: each gives the module or attribute of today, with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from meshfold.mesh import redirect_imports

T = TypeVar("T")

MOVED = {
    "meshfold.zero_gemini.disk": "meshfold.zero_gemini.nvme",
    "meshfold.zero_gemini.machine_rates.observed": "meshfold.zero_gemini.machine_rates.samples",
    "meshfold.zero_gemini.trace": "meshfold.zero_gemini.profiler",
    "meshfold.zero_gemini.watched_rates": "meshfold.zero_gemini.machine_rates.samples",
}
"""Old path of a module or folder: its path today. Modules in a moved folder have moved with it."""


def install() -> None:
    """Let imports find the old paths of meshfold.zero_gemini."""
    redirect_imports(MOVED)


def with_old_names(
    names: Mapping[str, str], arguments: Mapping[str, str] = MappingProxyType({})
) -> Callable[[type[T]], type[T]]:
    """Return a decorator that lets a class's attributes and arguments be used under old names, with a DeprecationWarning.

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
        construct: Callable[..., None] = cls.__init__

        @functools.wraps(construct)
        def constructor(self: T, *args: Any, **options: Any) -> None:
            for old in arguments.keys() & options.keys():
                message = f"{cls.__name__}({old}=...) is now {cls.__name__}({arguments[old]}=...)"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                options[arguments[old]] = options.pop(old)
            construct(self, *args, **options)

        if arguments:
            cls.__init__ = constructor  # type: ignore[assignment]
        for old, new in names.items():
            setattr(cls, old, renamed(cls, old, new))
        return cls

    return decorate
