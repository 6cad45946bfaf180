"""Kernels for CPU and GPU, each with a torch reference.

Every function of the model works on any device and floating dtype, computes in float32 (float64 for float64) and rounds once at the
output. Those of the optimizer (Adam, the pass over gradients) work on flat tensors in place, compute in float32, and give the same
bits in every implementation. :mod:`meshfold.kernels.dispatch` decides whether a function runs as plain torch, Triton or numba;
:func:`use` chooses by hand; :func:`available` lists what is installed. Inside torch.compile every function of the model is traced
as plain torch, in one graph, and fused by Inductor. Importing this package imports only torch. The first kernel that needs Triton
or numba imports it.
"""

from __future__ import annotations

from meshfold.kernels.activations import (
    geglu2,
    swiglu,
    swiglu2,
    weighted_swiglu,
)
from meshfold.kernels.adam import (
    AdamSettings,
    AdamState,
    QuantizedState,
    SplitState,
    WholeState,
    adam_step,
    adam_update_moments,
    adam_update_parameters,
    join_master,
    split_master,
)
from meshfold.kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_backward,
    local_max,
    loss_per_row,
    sum_exp_and_target,
)
from meshfold.kernels.dispatch import Availability, KernelError, available, count_kernels, count_parts, on_gpu, use
from meshfold.kernels.dropout import dropout
from meshfold.kernels.expert_choice import routing_totals, softmax_choice
from meshfold.kernels.expert_places import expert_places, pairs_of, running_counts
from meshfold.kernels.factored_lists import (
    came_distance_lists,
    factored_apply_lists,
    factored_limit_lists,
    square_sum_lists,
)
from meshfold.kernels.fp8 import (
    FP8_MULTIPLE,
    FP8_RECIPES,
    Fp8Dim,
    Fp8Maximum,
    Fp8Recipe,
    Fp8Tensor,
    fp8_cast_weight,
    fp8_gradient_casts,
    fp8_input_gradient,
    fp8_output,
    fp8_product,
    fp8_weight_gradient,
    to_fp8,
)
from meshfold.kernels.fp8_inputs import FP8_SOURCE, Fp8Source, casts_apart, shared_columns
from meshfold.kernels.fp8_products import bind_fp8_matmul, fp8_backward, fp8_forward
from meshfold.kernels.fp8_roofline import fp8_gain
from meshfold.kernels.fp8_shard import Fp8Shard, weight_scales
from meshfold.kernels.fp8_weight import Fp8Operands, Fp8Weight, Fp8WeightError, fp8_operand
from meshfold.kernels.functions import applied, once_differentiable
from meshfold.kernels.grad_pass import (
    largest_magnitude,
    sum_of_magnitudes,
    sum_of_squares,
    write_gradient,
)
from meshfold.kernels.grouped_products import grouped_product, grouped_shape
from meshfold.kernels.inputs import is_autocast
from meshfold.kernels.layerwise import LAYERWISE, lamb_direction, lars_step
from meshfold.kernels.linear_cross_entropy import (
    VocabularyShard,
    gradients_in_backward,
    linear_cross_entropy,
    linear_log_probs,
)
from meshfold.kernels.merge_attention import merge_attention_
from meshfold.kernels.nf4 import NF4_BLOCK, Nf4Linear, pack_nf4, unpack_nf4
from meshfold.kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from meshfold.kernels.one_shot import (
    OneShotMemory,
    one_shot_bytes,
    one_shot_rows,
    one_shot_slot,
    one_shot_sum,
    sum_add_norm,
)
from meshfold.kernels.one_shot_packets import PACKET_TRIES, packet_bytes, packet_product, packet_rows, packet_sum
from meshfold.kernels.overlap import overlapped_launches, overlaps_on
from meshfold.kernels.packed_weight import (
    PACKED_FORMATS,
    PackedWeight,
    keep_packed,
    largest_magnitudes,
    pack_weight,
    packed_weight_of,
    two_a_byte,
)
from meshfold.kernels.page_tables import PageTables
from meshfold.kernels.paged_attention import (
    CACHE_FORMS,
    KeyValuePages,
    attend_and_keep,
    attend_pages,
    attend_singles,
    masked_attention,
    of_codes,
    pages_in_triton,
    to_codes,
)
from meshfold.kernels.paged_rows import PagedChunk, PagedLayer, PagedRows, attend_chunk
from meshfold.kernels.pair_attention import (
    pair_attention,
    pair_attention_backward,
    pair_attention_forward,
    pair_attention_makes_logits,
)
from meshfold.kernels.random_bits import random_bits
from meshfold.kernels.random_bits import stream as random_stream
from meshfold.kernels.rotary import apply_rotary
from meshfold.kernels.row_product import RowWeight, row_product
from meshfold.kernels.row_tiles import RowCall, measured_row_tiles, take_row_tiles
from meshfold.kernels.segment_attention import segment_attention
from meshfold.kernels.segments import Segment, Segments
from meshfold.kernels.split_norms import (
    layer_norm_apply,
    layer_norm_backward_apply,
    layer_norm_backward_stats,
    layer_norm_joined,
    layer_norm_stats,
    rms_norm_apply,
    rms_norm_backward_apply,
    rms_norm_backward_stats,
    rms_norm_stats,
)
from meshfold.kernels.tensor_lists import (
    STEP_KERNELS,
    adamw_lists,
    apply_lists,
    average_lists,
    lamb_apply_lists,
    lamb_moment_lists,
    lion_lists,
)
from meshfold.kernels.token_graphs import TokenGraphs, tried_graphs
from meshfold.kernels.token_rows import add_rows_, sum_rows, take_rows, take_weighted_rows
from meshfold.kernels.token_state import TokenState, table_rows
from meshfold.kernels.weights_ahead import WeightsAhead
from meshfold.kernels.word_choice import choose_words, log_exponential, merge_words, word_parts

__all__ = [
    "CACHE_FORMS",
    "FP8_MULTIPLE",
    "FP8_RECIPES",
    "FP8_SOURCE",
    "LAYERWISE",
    "NF4_BLOCK",
    "PACKED_FORMATS",
    "PACKET_TRIES",
    "STEP_KERNELS",
    "AdamSettings",
    "AdamState",
    "Availability",
    "Fp8Dim",
    "Fp8Maximum",
    "Fp8Operands",
    "Fp8Recipe",
    "Fp8Shard",
    "Fp8Source",
    "Fp8Tensor",
    "Fp8Weight",
    "Fp8WeightError",
    "KernelError",
    "KeyValuePages",
    "Nf4Linear",
    "OneShotMemory",
    "PackedWeight",
    "PageTables",
    "PagedChunk",
    "PagedLayer",
    "PagedRows",
    "QuantizedState",
    "RowCall",
    "RowWeight",
    "Segment",
    "Segments",
    "SplitState",
    "TokenGraphs",
    "TokenState",
    "VocabularyShard",
    "WeightsAhead",
    "WholeState",
    "adam_step",
    "adam_update_moments",
    "adam_update_parameters",
    "adamw_lists",
    "add_layer_norm",
    "add_rms_norm",
    "add_rows_",
    "applied",
    "apply_lists",
    "apply_rotary",
    "attend_and_keep",
    "attend_chunk",
    "attend_pages",
    "attend_singles",
    "available",
    "average_lists",
    "bind_fp8_matmul",
    "came_distance_lists",
    "casts_apart",
    "choose_words",
    "count_kernels",
    "count_parts",
    "cross_entropy",
    "cross_entropy_backward",
    "dropout",
    "expert_places",
    "factored_apply_lists",
    "factored_limit_lists",
    "fp8_backward",
    "fp8_cast_weight",
    "fp8_forward",
    "fp8_gain",
    "fp8_gradient_casts",
    "fp8_input_gradient",
    "fp8_operand",
    "fp8_output",
    "fp8_product",
    "fp8_weight_gradient",
    "geglu2",
    "gradients_in_backward",
    "grouped_product",
    "grouped_shape",
    "is_autocast",
    "join_master",
    "keep_packed",
    "lamb_apply_lists",
    "lamb_direction",
    "lamb_moment_lists",
    "largest_magnitude",
    "largest_magnitudes",
    "lars_step",
    "layer_norm",
    "layer_norm_apply",
    "layer_norm_backward_apply",
    "layer_norm_backward_stats",
    "layer_norm_joined",
    "layer_norm_stats",
    "linear_cross_entropy",
    "linear_log_probs",
    "lion_lists",
    "local_max",
    "log_exponential",
    "loss_per_row",
    "masked_attention",
    "measured_row_tiles",
    "merge_attention_",
    "merge_words",
    "of_codes",
    "on_gpu",
    "once_differentiable",
    "one_shot_bytes",
    "one_shot_rows",
    "one_shot_slot",
    "one_shot_sum",
    "overlapped_launches",
    "overlaps_on",
    "pack_nf4",
    "pack_weight",
    "packed_weight_of",
    "packet_bytes",
    "packet_product",
    "packet_rows",
    "packet_sum",
    "pages_in_triton",
    "pair_attention",
    "pair_attention_backward",
    "pair_attention_forward",
    "pair_attention_makes_logits",
    "pairs_of",
    "random_bits",
    "random_stream",
    "rms_norm",
    "rms_norm_apply",
    "rms_norm_backward_apply",
    "rms_norm_backward_stats",
    "rms_norm_stats",
    "routing_totals",
    "row_product",
    "running_counts",
    "segment_attention",
    "shared_columns",
    "softmax_choice",
    "split_master",
    "square_sum_lists",
    "sum_add_norm",
    "sum_exp_and_target",
    "sum_of_magnitudes",
    "sum_of_squares",
    "sum_rows",
    "swiglu",
    "swiglu2",
    "table_rows",
    "take_row_tiles",
    "take_rows",
    "take_weighted_rows",
    "to_codes",
    "to_fp8",
    "tried_graphs",
    "two_a_byte",
    "unpack_nf4",
    "use",
    "weight_scales",
    "weighted_swiglu",
    "word_parts",
    "write_gradient",
]
