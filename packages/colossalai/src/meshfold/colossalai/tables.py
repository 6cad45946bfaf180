"""Tables of the arguments of Colossal-AI's plugins and configs. Defaults are Colossal-AI's (0.5 and earlier)."""

from __future__ import annotations

import math
from typing import Any

from meshfold.colossalai.arguments import Argument, Table, one_of, unless_zero

_KERNELS = "kernels are chosen by device and shape (meshfold doctor lists them)"
_PLAN = "print(engine.residency.plan) tells where what lives, once two steps were watched"
_OVERLAP = "communication runs beside computation wherever it can"
_CHUNKS = "the chunk size is searched for the least waste"
_LINKS = "gradients travel in buckets while backward runs"
_UNUSED = "parameters without a gradient are left alone"
_NO_FP8 = "there is no fp8 here: leave it out, and write precision='bf16'"
_NO_LEVELS = "shards go over all data ranks here: leave it out"
_MASTERS = (
    "master weights in float32 are always kept; fewer bytes take zero=dict(regime='B') or 'C' of Engine, leave it out"
)

PRECISIONS = {name: name for name in ("fp16", "bf16", "fp32", "fp64")}


def _scale(initial: float) -> Table:
    """Return the table of fp16's loss scaling."""
    values: dict[str, float] = dict(
        initial_scale=initial,
        min_scale=1,
        growth_factor=2,
        backoff_factor=0.5,
        growth_interval=1000,
        hysteresis=2,
        max_scale=2**32,
    )
    return {
        name: Argument(default=value, to=f"scale.{name}", always=True, by=_whole if name in _WHOLE else float)
        for name, value in values.items()
    }


_WHOLE = ("growth_interval", "hysteresis")


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _norm(value: Any) -> Any:
    if value in (math.inf, "inf"):
        return math.inf
    return value


_OPTIMIZATIONS: Table = {
    name: Argument(default=False, word=_KERNELS)
    for name in (
        "enable_all_optimization",
        "enable_fused_normalization",
        "enable_flash_attention",
        "enable_jit_fused",
    )
}

_SEQUENCE: Table = {
    "enable_sequence_parallelism": Argument(default=False, to="aside.sequence"),
    "sequence_parallelism_mode": Argument(to="aside.sequence_mode"),
    "sp_size": Argument(to="aside.sequence_size"),
    "enable_sequence_overlap": Argument(default=False, word="write sequence_parallelism_mode='ring'"),
}

_CLIP: Table = {"max_norm": Argument(default=0.0, to="engine.clip_grad_norm", by=unless_zero)}

_PRECISION: Table = {"precision": Argument(default="fp16", to="engine.precision", by=one_of(PRECISIONS), always=True)}

GEMINI: Table = {
    "chunk_config_dict": Argument(word=_CHUNKS),
    "chunk_init_device": Argument(word="placement says where chunks live"),
    "placement_policy": Argument(
        default="static",
        to="zero.placement",
        always=True,
        by=one_of({name: name for name in ("static", "auto", "cuda", "cpu", "const")}),
    ),
    "enable_gradient_accumulation": Argument(default=False, word="several backwards before a step always go"),
    "max_prefetch": Argument(default=0, word="the next unit is gathered while one runs"),
    "shard_param_frac": Argument(default=1.0, to="zero.stage", by=one_of({1.0: 3, 0.0: 2}), always=True),
    "offload_optim_frac": Argument(default=0.0, to="zero.offload_optim_frac"),
    "offload_param_frac": Argument(default=0.0, to="zero.offload_param_frac"),
    "warmup_non_model_data_ratio": Argument(default=0.8, word="a plan is made in place of ratios"),
    "steady_cuda_cap_ratio": Argument(default=0.9, word="a plan is made in place of ratios"),
    **_PRECISION,
    "master_weights": Argument(default=True, instead=_MASTERS),
    "pin_memory": Argument(default=False, word="host memory is page-locked wherever there is a GPU"),
    "force_outputs_fp32": Argument(default=False, instead="write output.float() where you need it"),
    "strict_ddp_mode": Argument(default=False, word=_CHUNKS),
    "search_range_m": Argument(default=32, word=_CHUNKS),
    "hidden_dim": Argument(word=_CHUNKS),
    "min_chunk_size_m": Argument(default=32, word=_CHUNKS),
    "memstats": Argument(word="memory is measured in the first steps"),
    "gpu_margin_mem_ratio": Argument(default=0.0, word="a plan is made in place of ratios"),
    **_scale(2**16),
    **_CLIP,
    "norm_type": Argument(default=2.0, to="engine.clip_norm_type", by=_norm),
    "tp_size": Argument(default=1, to="tensor.size"),
    "extra_dp_size": Argument(default=1, instead=_NO_LEVELS),
    **_OPTIMIZATIONS,
    **_SEQUENCE,
    "enable_async_reduce": Argument(default=True, word=_OVERLAP),
    "use_fp8": Argument(default=False, instead=_NO_FP8),
    "verbose": Argument(default=False, word=_PLAN),
    "fp8_communication": Argument(default=False, instead=_NO_FP8),
    "device": Argument(word="the engine knows the device of this rank"),
}

LOW_LEVEL_ZERO: Table = {
    "stage": Argument(default=1, to="zero.stage", always=True, by=one_of({1: 1, 2: 2, 3: 3})),
    **_PRECISION,
    **_scale(2**32),
    **_CLIP,
    "norm_type": Argument(default=2.0, to="engine.clip_norm_type", by=_norm),
    "reduce_bucket_size_in_m": Argument(default=12, word=_CHUNKS),
    "communication_dtype": Argument(word="gradients are summed in float32"),
    "overlap_communication": Argument(default=True, word=_OVERLAP),
    "overlap_allgather": Argument(default=False, word=_OVERLAP),
    "cpu_offload": Argument(default=False, to="zero.placement", always=True, by=one_of({True: "cpu", False: "cuda"})),
    "master_weights": Argument(default=True, instead=_MASTERS),
    "verbose": Argument(default=False, word=_PLAN),
    "cast_inputs": Argument(default=True, word="floating inputs take the model's dtype"),
    "fp8_communication": Argument(default=False, instead=_NO_FP8),
    "use_fp8": Argument(default=False, instead=_NO_FP8),
    "extra_dp_size": Argument(default=1, instead=_NO_LEVELS),
}

_DDP: Table = {
    "broadcast_buffers": Argument(default=True, word="a checkpoint has those of the first rank"),
    "bucket_cap_mb": Argument(default=25, word=_LINKS),
    "find_unused_parameters": Argument(default=False, word=_UNUSED),
    "check_reduction": Argument(default=False, word=_LINKS),
    "gradient_as_bucket_view": Argument(default=False, word=_LINKS),
    "static_graph": Argument(default=False, word=_UNUSED),
}

TORCH_DDP: Table = {**_DDP, "fp8_communication": Argument(default=False, instead=_NO_FP8)}

HYBRID: Table = {
    "tp_size": Argument(to="tensor.size"),
    "pp_size": Argument(to="pipeline.size"),
    "sp_size": _SEQUENCE["sp_size"],
    **_PRECISION,
    "zero_stage": Argument(default=0, to="zero.stage", by=one_of({0: None, 1: 1, 2: 2, 3: 3})),
    **_OPTIMIZATIONS,
    **{name: argument for name, argument in _SEQUENCE.items() if name != "sp_size"},
    "parallel_output": Argument(default=True, word="logits are whole where your code sees them"),
    "num_microbatches": Argument(to="pipeline.microbatches"),
    "microbatch_size": Argument(to="aside.microbatch_rows"),
    **_scale(2**16),
    **_CLIP,
    **{("ddp_" if name == "bucket_cap_mb" else "") + name: argument for name, argument in _DDP.items()},
    "zero_bucket_size_in_m": Argument(default=12, word=_CHUNKS),
    "cpu_offload": Argument(default=False, to="zero.placement", always=True, by=one_of({True: "cpu", False: "cuda"})),
    "communication_dtype": Argument(word="gradients are summed in float32"),
    "overlap_communication": Argument(default=True, word=_OVERLAP),
    "custom_policy": Argument(instead="give roles by name, engine=dict(rules={'*.mix': 'column'}); leave it out"),
    "pp_style": Argument(
        default="1f1b", to="pipeline.schedule", by=one_of({"1f1b": "1f1b", "interleaved": "interleaved", "zbv": "zb-v"})
    ),
    "num_model_chunks": Argument(default=1, to="pipeline.chunks"),
    "scheduler_nodes": Argument(word="the order is found from its name"),
    "num_layers_per_stage": Argument(instead="stages are cut to be even in elements: leave it out"),
    "gradient_checkpoint_config": Argument(instead="write engine=dict(recompute='blocks') and leave it out"),
    "enable_metadata_cache": Argument(default=True, word="shapes are known before the first step"),
    "make_vocab_size_divisible_by": Argument(default=64, word="a vocabulary is padded to what the mesh needs"),
    "dp_outside": Argument(default=True, instead="data is the outermost axis of a mesh: leave it out"),
    "overlap_p2p": Argument(default=True, word=_OVERLAP),
    "overlap_allgather": Argument(default=False, word=_OVERLAP),
    "fp8_communication": Argument(default=False, instead=_NO_FP8),
    "use_fp8": Argument(default=False, instead=_NO_FP8),
    "inner_ring_size": Argument(instead="one ring goes over all ranks of the axis: leave it out"),
}


def _dtype_name(value: Any) -> str:
    """Return the precision of a ``MixedPrecision`` of torch.

    Raises:
        ValueError: for anything else, and for another dtype.
    """
    names = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32", "None": "fp32"}
    found = names.get(str(getattr(value, "param_dtype", value)))
    if found is None or isinstance(value, str):
        raise ValueError(
            "give MixedPrecision(param_dtype=torch.bfloat16) of torch; a name goes to Booster(mixed_precision='bf16')"
        )
    return found


TORCH_FSDP: Table = {
    "process_group": Argument(instead="the spec's axes say which ranks share what: leave it out"),
    "sharding_strategy": Argument(
        to="zero.stage",
        always=True,
        by=one_of({None: 3, "FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": None}),
    ),
    "cpu_offload": Argument(
        to="zero.placement", always=True, by=lambda value: "cpu" if getattr(value, "offload_params", value) else "cuda"
    ),
    "auto_wrap_policy": Argument(word="units are the blocks of the model's lists"),
    "backward_prefetch": Argument(word="the unit that came next in the last step is gathered ahead"),
    "mixed_precision": Argument(to="engine.precision", by=_dtype_name),
    "ignored_modules": Argument(instead="all parameters are shared out: leave it out"),
    "param_init_fn": Argument(word="give a function that builds the model, or build it under LazyInitContext"),
    "sync_module_states": Argument(default=False, word="the weights of the first rank are always taken"),
    "fp8_communication": Argument(default=False, instead=_NO_FP8),
}

# -- the config of colossalai.initialize ----------------------------------------------------------------------------

_ENGINE = (
    "precision",
    "clip_norm_type",
    "clip_grad_value",
    "seed",
    "device",
    "rules",
    "recompute",
    "compile",
    "example",
)

CONFIG: Table = {
    "parallel": Argument(to="aside.parallel"),
    "zero": Argument(to="aside.zero"),
    "fp16": Argument(to="aside.fp16"),
    "clip_grad_norm": Argument(default=0.0, to="engine.clip_grad_norm", by=unless_zero),
    "gradient_accumulation": Argument(default=1, to="engine.gradient_accumulation"),
    "gradient_handler": Argument(word="which gradients are summed over which ranks follows from the parameters"),
    "torch_ddp": Argument(word=_LINKS),
    "cudnn_benchmark": Argument(default=True, to="aside.cudnn_benchmark"),
    "cudnn_deterministic": Argument(default=False, to="aside.cudnn_deterministic"),
    "model": Argument(
        to="pipeline.chunks", by=lambda value: value.get("num_chunks") if isinstance(value, dict) else None
    ),
    "NUM_MICRO_BATCHES": Argument(to="pipeline.microbatches"),
    **{name: Argument(to=f"engine.{name}") for name in _ENGINE},
}

ZERO_CONFIGS = ("model_config", "optimizer_config")

ZERO_MODEL: Table = {
    "shard_strategy": Argument(word=""),
    "tensor_placement_policy": Argument(default="cuda", to="zero.placement", always=True),
    "offload_config": Argument(to="zero.placement", by=lambda value: "cpu" if value.get("device") == "cpu" else "cuda"),
    "reduce_scatter_bucket_size_mb": Argument(default=25, word=_CHUNKS),
    "fp32_reduce_scatter": Argument(default=False, word="gradients are summed in float32"),
    "gradient_predivide_factor": Argument(default=1.0, word="gradients are summed in float32"),
    "reuse_fp16_shard": Argument(default=False, word="gradients have memory of their own"),
    "process_group": Argument(instead="the spec's axes say which ranks share what: leave it out"),
    "reduce_scatter_process_group": Argument(instead="the spec's axes say which ranks share what: leave it out"),
    "use_memory_tracer": Argument(default=False, word="memory is measured in the first steps"),
    "bf16": Argument(default=False, to="engine.precision", by=lambda value: "bf16" if value else None),
}

LOSS_SCALE = (
    "initial_scale",
    "min_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "max_scale",
)

ZERO_OPTIMIZER: Table = {
    **{name: Argument(to=f"scale.{name}") for name in LOSS_SCALE},
    "gpu_margin_mem_ratio": Argument(default=0.0, word="a plan is made in place of ratios"),
    "cpu_offload": Argument(default=False, to="zero.placement", by=lambda value: "cpu" if value else None),
    "verbose": Argument(default=False, word=_PLAN),
}

FP16: Table = {
    "mode": Argument(to="aside.mode"),
    "enabled": Argument(default=True, to="aside.enabled"),
    "init_scale": Argument(to="scale.initial_scale"),
    **{name: Argument(to=f"scale.{name}") for name in LOSS_SCALE},
    "clip_grad_norm": Argument(default=0.0, to="engine.clip_grad_norm", by=unless_zero),
    "log_num_zeros_in_grad": Argument(default=False, word="engine.last has the norm and the scale"),
    "verbose": Argument(default=False, word="engine.last has the norm and the scale"),
    "opt_level": Argument(default="O1", word="the model computes in float16 and its master weights are float32"),
    "loss_scale": Argument(default="dynamic", instead="the scale moves: write initial_scale=... and leave it out"),
}

# -- booster.save_model and its like --------------------------------------------------------------------------------

SAVE: Table = {
    "shard": Argument(default=False, to="aside.shard"),
    "use_safetensors": Argument(default=False, to="aside.use_safetensors"),
    "gather_dtensor": Argument(default=True, word="tensors are written whole"),
    "prefix": Argument(instead="files are called as Hugging Face calls them: leave it out"),
    "size_per_shard": Argument(default=1024, word="as many files are written as ranks are worth it"),
    "use_async": Argument(default=False, word="the files are there when the call comes back"),
}

LOAD: Table = {
    "strict": Argument(default=True, instead="give a checkpoint with all names of the model: leave it out"),
    "low_cpu_mem_mode": Argument(default=True, word="each rank reads its own parts, through a memory map"),
    "num_threads": Argument(default=1, word="each rank reads its own parts, through a memory map"),
}
