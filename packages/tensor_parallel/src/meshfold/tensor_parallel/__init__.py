"""Tensor parallelism by one layout algebra: plan a matmul, split any model, write your own mode."""

from meshfold.tensor_parallel.convert import Placed, Report, parallelize
from meshfold.tensor_parallel.cost import Cost, CostEntry
from meshfold.tensor_parallel.fp8_cast_products import Fp8CastProducts, bind_fp8_cast_products
from meshfold.tensor_parallel.fp8_matmul import bind_fp8_maximum, without_outer_ranks
from meshfold.tensor_parallel.layers import (
    CausalLMLoss,
    Embedding,
    LayerNorm,
    Linear,
    RMSNorm,
    cross_entropy,
    log_probs,
)
from meshfold.tensor_parallel.lowerings import matmul_cost
from meshfold.tensor_parallel.matmul import matmul
from meshfold.tensor_parallel.modes import MODES, Mode, find_mode
from meshfold.tensor_parallel.plan import MatmulPlan, Move, plan
from meshfold.tensor_parallel.plot import draw_matmul, draw_mesh, draw_mode
from meshfold.tensor_parallel.quantize import Quantized, quantize

__all__ = [
    "MODES",
    "CausalLMLoss",
    "Cost",
    "CostEntry",
    "Embedding",
    "Fp8CastProducts",
    "LayerNorm",
    "Linear",
    "MatmulPlan",
    "Mode",
    "Move",
    "Placed",
    "Quantized",
    "RMSNorm",
    "Report",
    "bind_fp8_cast_products",
    "bind_fp8_maximum",
    "cross_entropy",
    "draw_matmul",
    "draw_mesh",
    "draw_mode",
    "find_mode",
    "log_probs",
    "matmul",
    "matmul_cost",
    "parallelize",
    "plan",
    "quantize",
    "without_outer_ranks",
]
