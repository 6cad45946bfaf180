"""torchtitan 0.2.2's own Qwen3 with its expert parallel and FSDP2, as its trainer puts them together."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.absent import AbsentError
from benchmarks.peers.sharded import adamw_step


def torchtitan_step(job: dict[str, Any], ids: Tensor, *, compiled: bool) -> Callable[[], Tensor]:
    """Return the step of torchtitan's Qwen3-MoE, float32 masters, bfloat16 in compute.

    Args:
        job: of the benchmark: ``model`` has transformers' names.
        ids: this rank's rows.
        compiled: its blocks and its loss, as ``compile.enable`` does.

    Raises:
        AbsentError: if torchtitan, or what it needs, is not there.
    """
    for name in ("llama3", "llama4"):  # whose ways to shard Qwen3 uses
        without_data(f"torchtitan.models.{name}")
    package = without_data("torchtitan.models.qwen3")
    loaders: Any = ModuleType("torchtitan.hf_datasets.text_datasets")
    loaders.build_text_dataloader = loaders.build_text_validation_dataloader = None
    sys.modules.setdefault(loaders.__name__, loaders)
    try:
        args, parallelize = (import_module(f"{package}.{name}") for name in ("model.args", "infra.parallelize"))
        Qwen3Model = import_module(f"{package}.model.model").Qwen3Model
        config, dims, moe = (import_module(f"torchtitan.{name}") for name in ("config", "distributed", "models.moe"))
    except ImportError as error:
        raise AbsentError(
            f"{error}: give --wheels of torchtitan 0.2.2, tyro, docstring_parser, typeguard and torchdata"
        ) from error
    shape: dict[str, Any] = job["model"]
    ranks: int = job["ranks"]
    settings = args.Qwen3ModelArgs(
        vocab_size=shape["vocab_size"],
        max_seq_len=job["length"],
        head_dim=shape["head_dim"],
        dim=shape["hidden_size"],
        n_layers=shape["num_hidden_layers"],
        n_heads=shape["num_attention_heads"],
        n_kv_heads=shape["num_key_value_heads"],
        qk_norm=True,
        hidden_dim=shape["intermediate_size"],
        moe_enabled=True,
        moe_inter_dim=shape["moe_intermediate_size"],
        moe_args=moe.MoEArgs(
            num_experts=shape["num_experts"],
            num_shared_experts=0,
            top_k=shape["num_experts_per_tok"],
            score_func="softmax",
            route_norm=True,
            score_before_experts=False,
            load_balance_coeff=None,
        ),
    )
    job_config = config.JobConfig()
    job_config.training.seq_len = job["length"]
    job_config.activation_checkpoint.mode = "full" if job["recompute"] == "blocks" else "none"
    job_config.compile.enable = compiled
    job_config.compile.backend = job["backend"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cpu":
        without_gpu()
    parallel = dims.ParallelDims(dp_replicate=1, dp_shard=ranks, cp=1, tp=1, pp=1, ep=ranks, etp=1, world_size=ranks)
    with torch.device("meta"):
        model = Qwen3Model(settings)
    model = parallelize.parallelize_qwen3(model, parallel, job_config)
    if device == "cpu":  # gloo sums, and multiplies nothing
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device))
    model.train()

    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    loss_of: Callable[[Tensor, Tensor], Tensor] = (
        torch.compile(cross_entropy, backend=job["backend"]) if compiled else cross_entropy
    )

    def forward() -> Tensor:
        loss = loss_of(model(ids)[:, :-1], ids[:, 1:])
        return loss / ranks  # its FSDP2 adds gradients up without dividing

    step = adamw_step(model, forward)
    return lambda: step() * ranks


def without_gpu() -> None:
    """Let it run without a GPU, to try the command: its kernel has a twin in Python, and `histc` of whole numbers is a count."""
    dims: Any = import_module("torchtitan.distributed.parallel_dims")
    dims.device_type = "cpu"
    utils: Any = import_module("torchtitan.models.moe.utils")
    utils.generate_permute_indices = partial(utils.generate_permute_indices, use_cpu=True)

    def histc(values: Tensor, bins: int, **_: object) -> Tensor:
        counts = torch.zeros(bins, dtype=torch.int64)
        return counts.scatter_add(0, values.flatten(), torch.ones_like(values.flatten()))

    torch.histc = histc  # type: ignore[assignment]


def without_data(name: str) -> str:
    """Make a package whose own module is not run, for its submodules, and return its name.

    torchtitan's models import loaders of data, and with them `datasets`, which nobody here needs.

    Raises:
        AbsentError: if the package is not there.
    """
    parent, _, leaf = name.rpartition(".")
    try:
        found = importlib.util.find_spec(parent)
    except ImportError as error:
        raise AbsentError(f"{error}: give --wheels of torchtitan 0.2.2") from error
    if found is None or not found.submodule_search_locations:
        raise AbsentError(f"there is no {parent}: give --wheels of torchtitan 0.2.2")
    if name not in sys.modules:
        module = ModuleType(name)
        module.__path__ = [str(Path(found.submodule_search_locations[0]) / leaf)]
        sys.modules[name] = module
    return name
