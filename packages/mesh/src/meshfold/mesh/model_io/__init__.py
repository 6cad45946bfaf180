"""Inputs and outputs of a model: labels, packed documents, outputs that ranks share, runs on the meta device."""

from __future__ import annotations

from meshfold.mesh.model_io.dry_run import DryRun, eval_mode, map_tensors, saved_for_backward
from meshfold.mesh.model_io.kept_attention import ATTENTION_OF, KeptAttention, attention_seen, kept_attention
from meshfold.mesh.model_io.labels import (
    IGNORE_INDEX,
    LABEL_NAMES,
    CrossEntropyCall,
    LossMean,
    branch_starts,
    check_position_ids,
    count_targets,
    document_starts,
    ensure_one_target,
    ignore_document_starts,
    is_encoder_decoder,
    keep_on_host,
    loss_mean,
    segments_of,
    targets_key,
    visible,
)
from meshfold.mesh.model_io.lazy_tensor import ShardedOutput, lazy_gather, local_shard, meet_for_loss, meet_to_read
from meshfold.mesh.model_io.live_bytes import LiveBytes, storage_bytes
from meshfold.mesh.model_io.nested_tensors import tensors_in
from meshfold.mesh.model_io.operators import BACKWARD, FORWARD, REPEATED, Operator, OperatorCounter

__all__ = [
    "ATTENTION_OF",
    "BACKWARD",
    "FORWARD",
    "IGNORE_INDEX",
    "LABEL_NAMES",
    "REPEATED",
    "CrossEntropyCall",
    "DryRun",
    "KeptAttention",
    "LiveBytes",
    "LossMean",
    "Operator",
    "OperatorCounter",
    "ShardedOutput",
    "attention_seen",
    "branch_starts",
    "check_position_ids",
    "count_targets",
    "document_starts",
    "ensure_one_target",
    "eval_mode",
    "ignore_document_starts",
    "is_encoder_decoder",
    "keep_on_host",
    "kept_attention",
    "lazy_gather",
    "local_shard",
    "loss_mean",
    "map_tensors",
    "meet_for_loss",
    "meet_to_read",
    "saved_for_backward",
    "segments_of",
    "storage_bytes",
    "targets_key",
    "tensors_in",
    "visible",
]
