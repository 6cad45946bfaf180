"""Parameters of a sharded model: metadata, names, hooks, gradients and optimizer state."""

from __future__ import annotations

from meshfold.mesh.parameters.deferred_wgrad import (
    DefersWeightGrad,
    GradientHook,
    MatmulOperands,
    WeightGradQueue,
    WeightGradSite,
    accumulate_grad,
    accumulate_grad_product,
    after_gradients,
    defer_weight_grad,
    gradient_scope,
    may_defer,
)
from meshfold.mesh.parameters.grad_norm import (
    clip_gradient_values,
    clip_gradients,
    gradient_norm,
    gradient_shards,
    max_over_ranks,
)
from meshfold.mesh.parameters.gradient_proxy import GradientProxy
from meshfold.mesh.parameters.optimizer_probe import OptimizerProbeError, number_keys, probe_optimizer
from meshfold.mesh.parameters.parameter_meta import (
    ROLE,
    ParameterMeta,
    StoredValue,
    annotate,
    copy_parameter_hooks,
    metadata,
    metadata_on,
    uncompiled_name,
)
from meshfold.mesh.parameters.square_sums import (
    ShardedSquareSums,
    ShardOfTensor,
    holders_factor,
    square_sums_of_blocks,
)
from meshfold.mesh.parameters.tensor_blocks import ShardedBlocks, base_axis, blocks_of, sharded_blocks

__all__ = [
    "ROLE",
    "DefersWeightGrad",
    "GradientHook",
    "GradientProxy",
    "MatmulOperands",
    "OptimizerProbeError",
    "ParameterMeta",
    "ShardOfTensor",
    "ShardedBlocks",
    "ShardedSquareSums",
    "StoredValue",
    "WeightGradQueue",
    "WeightGradSite",
    "accumulate_grad",
    "accumulate_grad_product",
    "after_gradients",
    "annotate",
    "base_axis",
    "blocks_of",
    "clip_gradient_values",
    "clip_gradients",
    "copy_parameter_hooks",
    "defer_weight_grad",
    "gradient_norm",
    "gradient_scope",
    "gradient_shards",
    "holders_factor",
    "max_over_ranks",
    "may_defer",
    "metadata",
    "metadata_on",
    "number_keys",
    "probe_optimizer",
    "sharded_blocks",
    "square_sums_of_blocks",
    "uncompiled_name",
]
