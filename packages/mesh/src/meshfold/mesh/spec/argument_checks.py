"""Checks that the engine's arguments share: each returns a value of the promised type or raises a SpecError."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from meshfold.mesh.errors import SpecError, did_you_mean
from meshfold.mesh.spec.entry import format_value

P = ParamSpec("P")
R = TypeVar("R")


def count(name: str, value: object, least: int = 1) -> int:
    """Return a whole number from ``least`` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{name}={value!r}: {name} is a whole number from {least} up")
    return value


def positive(name: str, value: object, advice: str = "") -> float:
    """Return a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SpecError(f"{name}={value!r}: {name} is a number above 0{advice}")
    return float(value)


def named(entry: str, value: object, known: Mapping[str, object]) -> tuple[str, dict[str, Any]]:
    """Return ``"name"`` or ``dict(name="name", ...)`` as the known name and the other keys."""
    rest: dict[str, Any] = {}
    name = value
    if isinstance(value, Mapping):
        rest = dict(value)
        if "name" not in rest:
            raise SpecError(f"{entry}={value!r}: the dict needs a name, one of {', '.join(known)}")
        name = rest.pop("name")
    if not isinstance(name, str):
        raise SpecError(f"{entry}={value!r}: a name or a dict with one. Known: {', '.join(known)}")
    if name not in known:
        raise SpecError(
            f"{entry}={value!r}: there is no {entry} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}"
        )
    return name, rest


def known_keys(entry: str, value: object, keys: Mapping[str, Any], known: Mapping[str, object]) -> None:
    """Raise for the first unknown key."""
    for key in keys:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise SpecError(f"{entry}={value!r}: there is no key {key!r}.{hint} Known: {', '.join(known) or 'none'}")


def reject_unknown_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a constructor so that an unknown keyword raises a SpecError with the most similar name."""
    owner = method.__qualname__.partition(".")[0]
    known = [*inspect.signature(method).parameters][1:]

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if name not in known:
                raise SpecError(
                    f"{owner}({name}={format_value(value)}): there is no argument {name!r}.{did_you_mean(name, known)} "
                    f"Known: {', '.join(known)}"
                )
        return method(*args, **kwargs)

    return called


def signature_mismatch(function: Callable[..., object], *args: object, **kwargs: object) -> inspect.Signature | None:
    """Return the signature of a function that cannot be called like this; None if it can, or has no signature."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # built-in functions may have no signature
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return signature
    return None
