"""Triton's interpreter with its functions of ``triton.language`` put in place once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def patched_once() -> Iterator[None]:
    """Context manager: give ``triton.language`` its interpreted functions once. Triton does so anew for every launch and for
    every function that a kernel calls, which was a fourth of its time."""
    from triton import language
    from triton.runtime import interpreter

    patch, scopes = interpreter._patch_lang, {}

    def once(function: Any) -> Any:
        names = [name for name, value in function.__globals__.items() if value is language or value is language.core]
        modules = frozenset(function.__globals__[name].__name__ for name in names)
        if modules not in scopes:
            scopes[modules] = patch(function)
        return interpreter._LangPatchScope()  # nothing to put back after a launch

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang", once)
        yield
    for scope in reversed(scopes.values()):
        scope.restore()
