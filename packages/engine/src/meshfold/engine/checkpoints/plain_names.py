"""Tables by names as they are without ``torch.compile``, whoever has compiled which module since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from meshfold.mesh.parameters import uncompiled_name

T = TypeVar("T")


def with_plain_names(found: Mapping[str, T]) -> dict[str, T]:
    """The same under plain names; of what has one twice, the first."""
    named: dict[str, T] = {}
    for name, value in found.items():
        named.setdefault(uncompiled_name(name), value)
    return named
