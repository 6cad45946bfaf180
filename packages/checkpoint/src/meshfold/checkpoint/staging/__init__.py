"""Copies of tensors in host memory, made beside the training."""

from __future__ import annotations

from meshfold.checkpoint.staging.host_copies import (
    BackgroundCopies,
    CopyPair,
    CopyQueue,
    HostCopyQueue,
    StreamCopyQueue,
    copy_queue,
)
from meshfold.checkpoint.staging.pauses import with_pauses

__all__ = [
    "BackgroundCopies",
    "CopyPair",
    "CopyQueue",
    "HostCopyQueue",
    "StreamCopyQueue",
    "copy_queue",
    "with_pauses",
]
