"""Submodules of Colossal-AI by their paths: ``from meshfold.colossalai.nn.optimizer import HybridAdam``.

All names are in :mod:`meshfold.colossalai` itself. A script in which ``colossalai`` was replaced by ``meshfold.colossalai``
uses longer paths; each such path is an empty module that forwards every name. The error for a name
that does not exist here says what to write instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from meshfold.mesh import did_you_mean

HERE = "meshfold.colossalai"
_PAGE = "docs/from-colossalai.md lists every name with what to write"

PARTS = frozenset(
    {
        "accelerator",
        "activation_checkpoint",
        "adafactor",
        "amp",
        "apex_amp",
        "auto_parallel",
        "base",
        "booster",
        "builder",
        "came",
        "checkpoint",
        "checkpoint_io",
        "checkpointing",
        "chunk",
        "cli",
        "cluster",
        "colo_tensor",
        "coloparameter",
        "common",
        "communication",
        "config",
        "constants",
        "context",
        "core",
        "cpu_adam",
        "cuda",
        "data_sampler",
        "device",
        "dist_coordinator",
        "distributed_adafactor",
        "distributed_came",
        "distributed_galore",
        "distributed_lamb",
        "dp_plugin_base",
        "engine",
        "fused_adam",
        "fused_lamb",
        "fused_sgd",
        "galore",
        "gemini",
        "gemini_context",
        "gemini_plugin",
        "global_variables",
        "gradient_accumulation",
        "gradient_handler",
        "hooks",
        "hybrid_adam",
        "hybrid_parallel_checkpoint_io",
        "hybrid_parallel_plugin",
        "inference",
        "init",
        "initialize",
        "interface",
        "kernel",
        "lamb",
        "lars",
        "layer",
        "layers",
        "lazy",
        "legacy",
        "logging",
        "loss",
        "low_level",
        "low_level_zero_plugin",
        "lr_scheduler",
        "memory",
        "metric",
        "mixed_precision",
        "model",
        "model_wrapper",
        "modeling",
        "moe",
        "moe_context",
        "naive_amp",
        "nn",
        "one_d_layer",
        "optimizer",
        "p2p",
        "parallel",
        "parallel_1d",
        "parallel_2d",
        "parallel_2p5d",
        "parallel_3d",
        "parallel_context",
        "parallel_layers",
        "parallel_mode",
        "parallel_sequence",
        "parallelmode",
        "pipelinable",
        "pipeline",
        "plugin",
        "plugin_base",
        "policies",
        "process_group",
        "process_group_mesh",
        "profiler",
        "pytorch",
        "random",
        "registry",
        "schedule",
        "shard",
        "shard_utils",
        "sharded_init_context",
        "sharded_model",
        "sharded_model_v2",
        "sharded_optim",
        "shardformer",
        "stage_manager",
        "tensor",
        "testing",
        "timer",
        "torch_amp",
        "torch_ddp_plugin",
        "torch_fsdp_plugin",
        "trainer",
        "utils",
        "vanilla",
        "wrapped_layers",
        "wrapper",
        "zero",
    }
)
"""Words that the module paths of Colossal-AI consist of"""


def find(name: str, module: str, defined_in: dict[str, str]) -> Any:
    """Return a name that a script imports from a module of Colossal-AI.

    Args:
        name: the requested one.
        module: full name of the module.
        defined_in: name to the module that defines it here.

    Raises:
        AttributeError: for a name such as ``__wrapped__`` that Python itself looks up.
        ImportError: for any other unknown name, with what to write.
        ModuleNotFoundError: for a name that needs a package of Meshfold that is not installed, with the line that installs it.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if name in defined_in:
        try:
            return getattr(import_module(defined_in[name]), name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if not missing.startswith("meshfold."):
                raise
            install = f"pip install {missing.replace('.', '-').replace('_', '-')}"
            raise ModuleNotFoundError(f"{name} needs {missing}: {install}", name=missing) from error
    instead = instead_of(name)
    if instead is not None:
        raise ImportError(f"there is no {name} here; write {instead}", name=module)
    if name in PARTS:
        return import_module(f"{module}.{name}")
    is_ours = module == HERE and (Path(__file__).parent / f"{name}.py").exists()
    if is_ours:  # Python then imports the submodule
        raise AttributeError(name)
    raise ImportError(f"{module} has no {name!r}.{did_you_mean(name, defined_in)} {_PAGE}", name=module)


class _Paths(MetaPathFinder, Loader):
    """Finder and loader of these modules."""

    def __init__(self, defined_in: dict[str, str]) -> None:
        self._defined_in = defined_in

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module path of Colossal-AI that is not a module of ours.

        Raises:
            ModuleNotFoundError: for a path that Colossal-AI does not have either.
        """
        if not fullname.startswith(f"{HERE}."):
            return None
        parts = fullname.removeprefix(f"{HERE}.").split(".")
        if all(part in PARTS for part in parts):
            return ModuleSpec(fullname, self, is_package=True)
        unknown = next(part for part in parts if part not in PARTS)
        raise ModuleNotFoundError(
            f"{HERE} has no module {'.'.join(parts)!r}.{did_you_mean(unknown, PARTS)} All names are in {HERE} itself; {_PAGE}",
            name=fullname,
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return None: Python makes the module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Set the lookup of names at their first use."""
        module.__getattr__ = names_for(module.__name__, self._defined_in)  # type: ignore[method-assign]


def names_for(module: str, defined_in: dict[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module."""
    return partial(find, module=module, defined_in=defined_in)


def install(defined_in: dict[str, str]) -> None:
    """Register the import hook for their paths, once."""
    if not any(isinstance(finder, _Paths) for finder in sys.meta_path):
        sys.meta_path.append(_Paths(defined_in))  # last: files take precedence


ELSEWHERE: Mapping[str, str] = {
    "build_cifar": "torchvision.datasets.CIFAR10(...), and get_dataloader(dataset, batch_size=...)",
    "ColoParameter": "torch.nn.Parameter",
    "ComputePattern": "parallel=dict(tensor=4)",
    "ComputeSpec": "parallel=dict(tensor=4)",
    "convert_to_apex_amp": "precision='fp16' of the config or of Engine",
    "convert_to_naive_amp": "precision='fp16' of the config or of Engine",
    "convert_to_torch_amp": "precision='fp16' of the config or of Engine",
    "free_port": "meshfold run, which finds one",
    "gemini_zero_dpp": "zero=dict(stage=3)",
    "GeminiAdamOptimizer": "zero=dict(stage=3) with HybridAdam",
    "get_current_rank": "gpc.get_global_rank()",
    "MOE_CONTEXT": "nothing: leave it out",
    "move_to_cuda": "nothing: the engine brings batches to its device",
    "parallelize": "parallelize(model, mesh, '1d') of meshfold.tensor_parallel",
    "PipelineStageManager": "plugin.stage_manager",
    "print_rank_0": "get_dist_logger().info(message, ranks=[0]), or coordinator.print_on_master(message)",
    "report_memory_usage": "get_accelerator().max_memory_allocated()",
    "ReplicaSpec": "a layout of meshfold.mesh, as in Layout.parse('m k')",
    "ShardingSpec": "a layout of meshfold.mesh, as in Layout.parse('m:row k:col')",
    "sync_model_param": "nothing: the weights of the first rank are always taken",
    "sync_cuda": "get_accelerator().synchronize()",
    "Timer": "time.perf_counter(); meshfold train writes the times of steps to metrics.jsonl",
    "Accuracy": "a count of your own over engine(...) after engine.eval()",
    "build_pipeline_model": "parallel=dict(pipeline=2), which cuts the whole model",
    "ChunkManager": "zero=dict(stage=3)",
    "clip_grad_norm_fp32": "clip_grad_norm=1.0 of the config or of Engine",
    "colo_set_process_memory_fraction": "zero=dict(gpu_memory_limit='40GiB')",
    "ColoTensor": "a layout of meshfold.mesh, as in Layout.parse('m:row k:col')",
    "convert_to_amp": "precision='fp16' of the config or of Engine",
    "cast_to_distributed": "nothing: the engine sees to shards, whatever the class",
    "CrossEntropyLoss": "torch.nn.CrossEntropyLoss",
    "DataParallelSampler": "get_dataloader(dataset, batch_size=...)",
    "DeviceMesh": "Mesh(dict(data=2, tensor=4)) of meshfold.mesh",
    "FusedAdam": "optimizer=dict(name='adamw', lr=...), or HybridAdam",
    "FusedLAMB": "optimizer=dict(name='lamb', lr=...), after clip_grad_norm=1.0: FusedLAMB clips by itself",
    "FusedSGD": "torch.optim.SGD",
    "GaLoreAdafactor": "optimizer=dict(name='galore_adafactor', lr=..., rank=256)",
    "GaLoreAdamW": "optimizer=dict(name='galore_adamw', lr=..., rank=256)",
    "GeminiDDP": "zero=dict(stage=3)",
    "hooks": "a loop over engine.train_step(batch), with what the hooks did in it",
    "InterleavedPipelineSchedule": "pipeline=dict(size=2, schedule='interleaved', chunks=2)",
    "load_checkpoint": "engine.load(folder)",
    "LoRAConfig": "peft.LoraConfig and peft.get_peft_model(model, lora_config), before the optimizer is made",
    "MoeHybridParallelPlugin": "Engine(model, parallel=dict(data=4, expert=4)), which spreads experts over ranks",
    "MultiTimer": "time.perf_counter(); meshfold train writes the times of steps to metrics.jsonl",
    "partition_batch": "engine.shard_batch(global_batch)",
    "PipelinableContext": "parallel=dict(pipeline=2), which cuts the whole model",
    "PipelineSchedule": "pipeline=dict(size=2, microbatches=8)",
    "Policy": "rules={'*.mix': 'column'} of Engine, where names and shapes do not tell",
    "ProcessGroup": "Mesh(dict(data=2, tensor=4)) of meshfold.mesh",
    "save_checkpoint": "engine.save(folder)",
    "seed": "the code inside alone: dropout follows the elements of the global batch, on every rank",
    "set_seed": "seed=0 in the config, or Engine(..., seed=0)",
    "ShardConfig": "parallel=dict(tensor=4)",
    "ShardedModelV2": "zero=dict(stage=3)",
    "ShardedOptimizerV2": "zero=dict(stage=3)",
    "ShardFormer": "parallelize(model, mesh, '1d') of meshfold.tensor_parallel",
    "ShardSpec": "a layout of meshfold.mesh, as in Layout.parse('m:row k:col')",
    "split_batch_2d": "engine.shard_batch(global_batch)",
    "Trainer": "a loop over engine.train_step(batch); or Lightning's Trainer",
    "zero_model_wrapper": "zero=dict(stage=3)",
    "zero_optim_wrapper": "zero=dict(stage=3)",
    "ZeroDDP": "zero=dict(stage=3)",
    "ZeroOptimizer": "zero=dict(stage=3)",
}

FAMILIES: Mapping[str, str] = {
    "vit_*": "a model of torchvision or timm, or meshfold.models",
    "gpt*_*": "transformers.GPT2LMHeadModel, or meshfold.models",
    "*CheckpointIO": "booster.save_model(model, folder, shard=True) and its like, or engine.save(folder)",
    "*Policy": "rules={'*.mix': 'column'} of Engine, where names and shapes do not tell",
    "*MixedPrecision": "Booster(mixed_precision='bf16'), or a plugin's precision='bf16'",
    "VocabParallelCrossEntropyLoss*": "cross_entropy of meshfold.tensor_parallel, or torch.nn.CrossEntropyLoss",
    "*Embedding*": "torch.nn.Embedding, or Embedding(..., mesh=mesh) of meshfold.tensor_parallel",
    "*Linear*": "torch.nn.Linear, or Linear(..., mesh=mesh, mode='2d') of meshfold.tensor_parallel",
    "*LayerNorm*": "torch.nn.LayerNorm, or LayerNorm(..., mesh=mesh) of meshfold.tensor_parallel",
    "*Classifier*": "torch.nn.Linear",
    "*Dropout*": "torch.nn.Dropout",
    "*LR": "the class of this name in torch.optim.lr_scheduler, or a LambdaLR",
    "*Hook": "a loop over engine.train_step(batch), with what the hook did in it",
    "*Schedule": "parallel=dict(pipeline=dict(size=2, schedule='1f1b'))",
}
"""Patterns for families of names; the first match says what to write."""


def instead_of(name: str) -> str | None:
    """Return what to write for a name of Colossal-AI that is not here; None for an unknown name."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    return next((word for pattern, word in FAMILIES.items() if fnmatchcase(name, pattern)), None)
