"""``AMP_TYPE`` of Colossal-AI's configs: ``fp16=dict(mode=AMP_TYPE.NAIVE)``."""

from __future__ import annotations

from enum import Enum
from typing import Any

from meshfold.colossalai.submodules import find


class AMP_TYPE(Enum):  # noqa: N801
    """Three ways to float16 there; one here: a model in float16 with true weights in float32."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


__path__: list[str] = []  # there it has submodules


def __getattr__(name: str) -> Any:
    """Other names that this module has there."""
    from meshfold import colossalai as compat

    return find(name, __name__, compat._HOMES)
