"""Eager runs of compiled code, in contexts that may end in any order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


class _Open:
    """The contexts that are open: torch's stance is set by the first and put back by the last.

    ``torch.compiler.set_stance`` puts back what it found. Two contexts that do not end in reverse order would leave compiled code
    eager for good.
    """

    def __init__(self) -> None:
        self.count = 0
        self.stance = ExitStack()


_open = _Open()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Context manager: code compiled by ``torch.compile`` runs eagerly, so that modes see its operations."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    if not _open.count:
        _open.stance.enter_context(torch.compiler.set_stance("force_eager"))
    _open.count += 1
    try:
        yield
    finally:
        _open.count -= 1
        if not _open.count:
            _open.stance.close()
