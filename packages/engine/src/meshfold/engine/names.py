"""Names of parameters and buffers as they are without ``torch.compile``, whoever has compiled which module since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

_WRAPPED = "_orig_mod"  # how torch.compile(module) names the module in the one it makes


def plain(name: str) -> str:
    """A name in the model that was written.

    >>> plain("blocks.0._orig_mod.up.weight")
    'blocks.0.up.weight'
    """
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _WRAPPED in name else name


def with_plain_names(found: Mapping[str, T]) -> dict[str, T]:
    """The same under plain names; of what has one twice, the first."""
    named: dict[str, T] = {}
    for name, value in found.items():
        named.setdefault(plain(name), value)
    return named
