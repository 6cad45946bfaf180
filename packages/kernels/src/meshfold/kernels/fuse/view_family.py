"""Views of logits that wait: in torch they would share memory.

Each is computed by itself, when it is read. So a write to one in place would not be seen in the others, and a write to the rows
that the head has yet to read would be: both are errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor

_WRITES = re.compile(r"__setitem__|__i(?:add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__|\w*[^_]_")


def writes(func: Callable[..., Any]) -> bool:
    """Return True for a function of torch that changes its first argument in place, by its name."""
    return _WRITES.fullmatch(getattr(func, "__name__", "")) is not None


class ViewFamily:
    """Logits that wait, and their views."""

    def __init__(self, rows: Tensor) -> None:
        """``rows``: that the head will read."""
        self._rows, self._version = rows, _version(rows)
        self._computed: list[tuple[ref[Tensor], int]] = []
        self._written: list[Tensor] = []

    def note_computed(self, values: Tensor) -> None:
        """Note the values of one of them, just computed."""
        self._computed.append((ref(values), _version(values)))

    def keep_written(self, values: Tensor) -> None:
        """Keep values that were changed, which would be forgotten with a view that nobody else has."""
        self._written.append(values)

    def check_rows(self, name: str) -> None:
        """Raise a RuntimeError if the rows have changed since the head was called; ``name``: of the head."""
        if _version(self._rows) != self._version:
            raise RuntimeError(
                f"the input of {name} was changed in place after the call, and its logits wait for their loss: change a copy, or "
                "have the logits computed at once with kernels=dict(loss=False)"
            )

    def check_views(self, name: str, own: Tensor | None = None) -> None:
        """Raise a RuntimeError if others than a view's ``own`` values were changed: it does not see that."""
        for reference, version in self._computed:
            values = reference()
            if values is not None and values is not own and _version(values) != version:
                raise RuntimeError(
                    f"logits of {name} were changed in place, and are read through a view that was taken before: change a copy, as "
                    "masked_fill does, or have them computed at once with kernels=dict(loss=False)"
                )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
