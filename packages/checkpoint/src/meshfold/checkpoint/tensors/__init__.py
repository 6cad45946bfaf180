"""Files of tensors: safetensors, alone or in sets, whole or as shards; weights in other formats."""

from __future__ import annotations

from meshfold.checkpoint.tensors.file_set import (
    SAFETENSORS_NAME,
    SAFETENSORS_SUFFIX,
    BackgroundWriter,
    FileAssignment,
    has_weights,
    open_tensors,
    open_weights,
    verify_checksums,
)
from meshfold.checkpoint.tensors.safetensors_file import (
    SafetensorsHeader,
    TensorFile,
    TensorInfo,
    TensorWriter,
    writing_order,
)
from meshfold.checkpoint.tensors.shard_files import (
    StoredTensor,
    shard_file_name,
    shard_index_name,
    shard_key,
    write_shard_index,
)
from meshfold.checkpoint.tensors.tensor_folder import TensorFolder, check_inside_folder, is_file_name

__all__ = [
    "SAFETENSORS_NAME",
    "SAFETENSORS_SUFFIX",
    "BackgroundWriter",
    "FileAssignment",
    "SafetensorsHeader",
    "StoredTensor",
    "TensorFile",
    "TensorFolder",
    "TensorInfo",
    "TensorWriter",
    "check_inside_folder",
    "has_weights",
    "is_file_name",
    "open_tensors",
    "open_weights",
    "shard_file_name",
    "shard_index_name",
    "shard_key",
    "verify_checksums",
    "write_shard_index",
    "writing_order",
]

Described = TensorInfo  # its name in version 0.1
