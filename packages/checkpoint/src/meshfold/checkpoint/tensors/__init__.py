"""Files of tensors: safetensors, alone or in sets, whole or as shards; weights in other formats."""

from __future__ import annotations

from meshfold.checkpoint.tensors.safetensors_file import Described, TensorFile, TensorWriter

__all__ = ["Described", "TensorFile", "TensorWriter"]
