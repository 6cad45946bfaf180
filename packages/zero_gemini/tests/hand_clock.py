"""A clock for traces that a test moves by hand."""

from __future__ import annotations


class HandClock:
    """Stands still while anything is computed, and goes on when ``now``, in seconds, is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __enter__(self) -> HandClock:
        return self

    def __exit__(self, *error: object) -> None: ...

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin
