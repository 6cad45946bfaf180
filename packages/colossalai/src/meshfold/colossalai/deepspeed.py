"""Translation of a DeepSpeed config to arguments of ``Engine``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshfold.colossalai.arguments import Argument, Table, one_of, translate, unless_zero
from meshfold.colossalai.settings import engine_settings
from meshfold.mesh import SpecError

_WHAT = "the config of DeepSpeed"
_ROWS = "rows are those of the batches that you hand to train_step, or batch_size of engine.dataloader"
_CHUNKS = "chunks are searched for the least waste, and moved when they are needed"
_SAYS = "engine.last has loss, norm, rate and scale of a step; meshfold train writes them to a file"
_ALWAYS = "it is so anyway"


def _if_enabled(name: str) -> Argument:
    return Argument(default=False, to="engine.precision", by=lambda value: name if value else None)


def _words(prefix: str, names: str, word: str) -> Table:
    return {f"{prefix}{name}": Argument(word=word) for name in names.split()}


TABLE: Table = {
    **_words("", "train_batch_size train_micro_batch_size_per_gpu", _ROWS),
    "gradient_accumulation_steps": Argument(default=1, to="engine.gradient_accumulation"),
    "gradient_clipping": Argument(default=0.0, to="engine.clip_grad_norm", by=unless_zero),
    "bf16.enabled": _if_enabled("bf16"),
    "fp16.enabled": _if_enabled("fp16"),
    "fp16.loss_scale": Argument(default=0.0, instead="the scale moves: write 0, which means so"),
    "fp16.initial_scale_power": Argument(default=16, to="scale.initial_scale", by=lambda power: 2.0**power),
    "fp16.loss_scale_window": Argument(default=2000, to="scale.growth_interval"),
    "fp16.hysteresis": Argument(default=1, to="scale.hysteresis"),
    "fp16.min_loss_scale": Argument(default=1.0, to="scale.min_scale"),
    **_words("fp16.", "auto_cast consecutive_hysteresis", "floating inputs take the model's dtype"),
    "amp.enabled": Argument(default=False, instead="write fp16 or bf16 in its place"),
    "zero_optimization.stage": Argument(default=0, to="zero.stage", by=one_of({0: None, 1: 1, 2: 2, 3: 3})),
    "zero_optimization.offload_optimizer.device": Argument(default="none", to="aside.optimizer"),
    "zero_optimization.offload_optimizer.ratio": Argument(to="aside.ratio"),
    "zero_optimization.offload_optimizer.nvme_path": Argument(to="aside.path"),
    "zero_optimization.offload_param.device": Argument(default="none", to="aside.param"),
    **_words(
        "zero_optimization.offload_optimizer.",
        "pin_memory buffer_count fast_init pipeline_read pipeline_write",
        _ALWAYS,
    ),
    **_words("zero_optimization.offload_param.", "pin_memory buffer_count buffer_size max_in_cpu nvme_path", _ALWAYS),
    **_words(
        "zero_optimization.",
        "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size contiguous_gradients "
        "sub_group_size stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_gather_16bit_weights_on_model_save round_robin_gradients "
        "ignore_unused_parameters elastic_checkpoint load_from_fp32_weights",
        _CHUNKS,
    ),
    "zero_optimization.zero_hpz_partition_size": Argument(
        default=1, instead="shards go over all data ranks: leave it out"
    ),
    **{
        f"zero_optimization.{name}": Argument(
            default=False, instead="weights and gradients travel as they are: leave it out"
        )
        for name in ("zero_quantized_weights", "zero_quantized_gradients")
    },
    "tensor_parallel.autotp_size": Argument(default=1, to="tensor.size"),
    "sequence_parallel_size": Argument(default=1, to="aside.sequence"),
    "optimizer.type": Argument(to="aside.type"),
    "optimizer.params": Argument(to="aside.params"),
    "scheduler": Argument(
        instead="schedules are torch's: leave it out, and write Engine(..., lr_scheduler=lambda optimizer: "
        "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps))"
    ),
    "activation_checkpointing": Argument(instead="leave it out, and write Engine(..., recompute='blocks')"),
    "aio": Argument(word="reading and writing of a disk has no settings"),
    "data_types.grad_accum_dtype": Argument(word="gradients are summed in float32"),
    **_words(
        "",
        "prescale_gradients gradient_predivide_factor communication_data_type sparse_gradients",
        "gradients are summed in float32",
    ),
    **_words(
        "",
        "steps_per_print wall_clock_breakdown dump_state memory_breakdown tensorboard wandb csv_monitor comms_logger "
        "flops_profiler",
        _SAYS,
    ),
    **_words("", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer checkpoint", _ALWAYS),
}

_OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "sgd": "sgd"}


def from_deepspeed(config: Mapping[str, Any] | str | os.PathLike[str], *, say: bool = True) -> dict[str, Any]:
    """Return the arguments of an engine for a config of DeepSpeed: ``Engine(model, **from_deepspeed("ds.json"))``.

    ``"auto"`` values count as omitted. ``print`` the result and write it into the script to complete the migration.

    Args:
        config: a dict, or the path of a JSON file.
        say: warn, once, about entries without effect.

    Raises:
        SpecError: for unknown keys and unsupported values, with what to write instead.
    """
    entries = config if isinstance(config, Mapping) else _read(config)
    found = translate(_WHAT, _flat(entries, ""), TABLE)
    if all(_on(entries.get(name)) for name in ("bf16", "fp16")):
        raise SpecError(f"{_WHAT}: bf16 and fp16 are both enabled: leave one of them out")
    if say:
        found.say("from_deepspeed")
    aside = found.under("aside")
    parallel: dict[str, Any] = {}
    if "tensor.size" in found.settings:
        parallel["tensor"] = found.settings["tensor.size"]
    if "sequence" in aside:
        parallel["sequence"] = {"mode": "ulysses", "size": aside["sequence"]}
    if "zero.stage" in found.settings:
        parallel["zero"] = {"stage": found.settings["zero.stage"], **_placement(aside)}
    optimizer = {"optimizer": _optimizer(aside)} if "type" in aside else {}
    return {"parallel": parallel, **optimizer, **engine_settings(found)}


def _read(file: object) -> Mapping[str, Any]:
    """Return the entries of a JSON file."""
    if not isinstance(file, str | os.PathLike):
        raise SpecError(f"from_deepspeed({file!r}): a dict, or the path of a JSON file")
    try:
        entries = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"from_deepspeed({str(file)!r}): cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SpecError(f"from_deepspeed({str(file)!r}): it is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise SpecError(
            f"from_deepspeed({str(file)!r}): it holds a {type(entries).__name__}, and not an object {{...}}"
        )
    return entries


def _on(entry: object) -> bool:
    return isinstance(entry, Mapping) and entry.get("enabled") is True


def _flat(value: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Yield every entry with its path, down to the entries of the table."""
    found: dict[str, Any] = {}
    for key, entry in value.items():
        path = f"{prefix}{key}"
        if path not in TABLE and isinstance(entry, Mapping):
            found.update(_flat(entry, f"{path}."))
        elif path not in TABLE and any(name.startswith(f"{path}.") for name in TABLE):
            names = [name.removeprefix(f"{path}.").split(".")[0] for name in TABLE if name.startswith(f"{path}.")]
            raise SpecError(f"{_WHAT}: {path}={entry!r}: write a dict with keys such as {names[0]!r}")
        elif entry != "auto":
            found[path] = entry
    return found


def _placement(aside: Mapping[str, Any]) -> dict[str, Any]:
    """Return the placement of the optimizer's state and parameters."""
    optimizer, parameters = aside.get("optimizer", "none"), aside.get("param", "none")
    if parameters == "nvme":
        raise SpecError("offload_param.device='nvme': parameters stay on the device or on the host: write 'cpu'")
    if optimizer == "nvme":
        if "path" not in aside:
            raise SpecError("offload_optimizer.device='nvme' without nvme_path: write the folder")
        return {"placement": "cpu" if parameters == "cpu" else "auto", "offload_path": aside["path"]}
    if parameters == "cpu":
        return {"placement": "cpu"}
    if optimizer == "cpu":
        return {"placement": "static", "offload_optim_frac": float(aside.get("ratio", 1.0))}
    return {"placement": "cuda"}


def _optimizer(aside: Mapping[str, Any]) -> dict[str, Any]:
    name = str(aside["type"]).lower()
    settings = {key: value for key, value in (aside.get("params") or {}).items() if value != "auto"}
    if name not in _OPTIMIZERS:
        raise SpecError(
            f"optimizer.type={aside['type']!r}: Adam, AdamW and SGD are known by name; give Engine(..., optimizer=dict(name=cls)) "
            "any class that steps elementwise, and leave it out here"
        )
    if name == "adam" and settings.pop("adam_w_mode", True):  # DeepSpeed's Adam is AdamW by default
        name = "adamw"
    settings.pop("torch_adam", None)
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])
    return {"name": _OPTIMIZERS[name], **settings}
