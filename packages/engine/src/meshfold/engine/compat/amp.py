"""``AMP_TYPE`` of Colossal-AI's configs: ``fp16=dict(mode=AMP_TYPE.NAIVE)``."""

from __future__ import annotations

from enum import Enum


class AMP_TYPE(Enum):  # noqa: N801
    """Three ways to float16 there; one here: a model in float16 with true weights in float32."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"
