"""Evoformer and Pairformer in plain torch, and the axial layouts that split them over ranks."""

from __future__ import annotations

from meshfold.folding.adopt import adopt_models
from meshfold.folding.axial import AXIAL_MODES, Axes, AxialMode, find_axial_mode
from meshfold.folding.axial.sizes import Sizes
from meshfold.folding.dropout import SharedDropout
from meshfold.folding.esmfold import EsmFoldBlock, EsmFoldStack
from meshfold.folding.esmfold_trunk import EsmFoldTrunk
from meshfold.folding.evoformer import EvoformerBlock, EvoformerStack, ExtraMSABlock, ExtraMSAStack, PairStack
from meshfold.folding.functions import attend, gate, key_bias_of, layer_norm, multiply_edges
from meshfold.folding.gradient_sums import split_parameters, sum_gradients
from meshfold.folding.memory import MemorySettings
from meshfold.folding.msa import (
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSARowAttentionWithPairBias,
    OuterProductMean,
)
from meshfold.folding.pairformer import AttentionPairBias, PairFormerBlock, PairFormerStack
from meshfold.folding.parallelize import parallelize_folding
from meshfold.folding.planning import (
    FoldingRun,
    MemoryPlan,
    MemoryPlanError,
    StackWork,
    count_work,
    find_plan,
    longest_chain,
    plan_memory,
)
from meshfold.folding.presets import PAIRS_OF_ESMFOLD2, PRESETS, FoldingOutline, find_outline, recycled_bytes
from meshfold.folding.primitives import Attention, GlobalAttention, LayerNorm, Linear
from meshfold.folding.stack import Stack
from meshfold.folding.structure_rows import PairRows, rows_bytes, structure_bytes
from meshfold.folding.template import TemplatePairStack, TemplatePairStackBlock
from meshfold.folding.traffic import folding_cost
from meshfold.folding.transitions import SwiGLUTransition, Transition
from meshfold.folding.triangle import (
    TriangleAttention,
    TriangleMultiplicationIncoming,
    TriangleMultiplicationOutgoing,
)

__all__ = [
    "AXIAL_MODES",
    "PAIRS_OF_ESMFOLD2",
    "PRESETS",
    "Attention",
    "AttentionPairBias",
    "Axes",
    "AxialMode",
    "EsmFoldBlock",
    "EsmFoldStack",
    "EsmFoldTrunk",
    "EvoformerBlock",
    "EvoformerStack",
    "ExtraMSABlock",
    "ExtraMSAStack",
    "FoldingOutline",
    "FoldingRun",
    "GlobalAttention",
    "LayerNorm",
    "Linear",
    "MSAColumnAttention",
    "MSAColumnGlobalAttention",
    "MSARowAttentionWithPairBias",
    "MemoryPlan",
    "MemoryPlanError",
    "MemorySettings",
    "OuterProductMean",
    "PairFormerBlock",
    "PairFormerStack",
    "PairRows",
    "PairStack",
    "SharedDropout",
    "Sizes",
    "Stack",
    "StackWork",
    "SwiGLUTransition",
    "TemplatePairStack",
    "TemplatePairStackBlock",
    "Transition",
    "TriangleAttention",
    "TriangleMultiplicationIncoming",
    "TriangleMultiplicationOutgoing",
    "adopt_models",
    "attend",
    "count_work",
    "find_axial_mode",
    "find_outline",
    "find_plan",
    "folding_cost",
    "gate",
    "key_bias_of",
    "layer_norm",
    "longest_chain",
    "multiply_edges",
    "parallelize_folding",
    "plan_memory",
    "recycled_bytes",
    "rows_bytes",
    "split_parameters",
    "structure_bytes",
    "sum_gradients",
]
