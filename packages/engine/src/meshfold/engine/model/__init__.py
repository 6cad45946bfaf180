"""Preparation of a rank's model: stages, recomputed blocks, weights from folders."""

from __future__ import annotations

from meshfold.engine.model.fp8_layers import use_fp8
from meshfold.engine.model.fp8_weights import fp8_cast_bytes, fp8_gathered
from meshfold.engine.model.fused_kernels import check_kernels
from meshfold.engine.model.ownership import AsGiven
from meshfold.engine.model.pipelined_model import PipelinedModel, PipelineSettings
from meshfold.engine.model.recompute import (
    EVERY_BLOCK,
    RecomputedBlocks,
    check_recompute,
    recompute_blocks,
)
from meshfold.engine.model.repeated_blocks import find_blocks
from meshfold.engine.model.roots import callable_parts, roots_of
from meshfold.engine.model.weight_source import Loaded, SourceValues, WeightSource

__all__ = [
    "EVERY_BLOCK",
    "AsGiven",
    "Loaded",
    "PipelineSettings",
    "PipelinedModel",
    "RecomputedBlocks",
    "SourceValues",
    "WeightSource",
    "callable_parts",
    "check_kernels",
    "check_recompute",
    "find_blocks",
    "fp8_cast_bytes",
    "fp8_gathered",
    "recompute_blocks",
    "roots_of",
    "use_fp8",
]
