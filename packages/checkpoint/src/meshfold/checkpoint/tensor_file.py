"""Old path of :mod:`meshfold.checkpoint.tensors`."""

from __future__ import annotations

import warnings

from meshfold.checkpoint.tensors import TensorFile, TensorWriter
from meshfold.checkpoint.tensors import TensorInfo as Described

__all__ = ["Described", "TensorFile", "TensorWriter"]

warnings.warn(
    f"{__name__} is now meshfold.checkpoint.tensors, and Described is TensorInfo: change the import",
    DeprecationWarning,
    stacklevel=2,
)
