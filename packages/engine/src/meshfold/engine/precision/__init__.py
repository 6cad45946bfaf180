"""Precisions: compute and master dtypes, and the loss scale of fp16."""

from __future__ import annotations

from meshfold.engine.precision.precision import (
    LossScaler,
    Masters,
    Precision,
    ScaleSettings,
    cast_rest,
    other_dtypes,
)

__all__ = ["LossScaler", "Masters", "Precision", "ScaleSettings", "cast_rest", "other_dtypes"]
