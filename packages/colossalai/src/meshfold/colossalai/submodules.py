"""Submodules of Colossal-AI by their paths: ``from meshfold.colossalai.nn.optimizer import HybridAdam``.

All names are in :mod:`meshfold.colossalai` itself. A script in which ``colossalai`` was replaced by ``meshfold.colossalai``
asks for them under longer paths; each such path is an empty module that hands every name on. A name that is nowhere says what
to write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from meshfold.colossalai.replacements import instead_of
from meshfold.mesh import did_you_mean

HERE = "meshfold.colossalai"
_PAGE = "docs/from-colossalai.md lists every name with what to write"

PARTS = frozenset({
    "accelerator", "activation_checkpoint", "amp", "apex_amp", "auto_parallel", "base", "booster", "builder", "checkpoint",
    "checkpoint_io", "checkpointing", "chunk", "cli", "cluster", "colo_tensor", "coloparameter", "common", "communication",
    "config", "constants", "context", "core", "cpu_adam", "cuda", "data_sampler", "device", "dist_coordinator",
    "dp_plugin_base", "engine", "fused_adam", "gemini", "gemini_context", "gemini_plugin", "global_variables",
    "gradient_accumulation", "gradient_handler", "hooks", "hybrid_adam", "hybrid_parallel_checkpoint_io",
    "hybrid_parallel_plugin", "inference", "init", "initialize", "interface", "kernel", "layer", "layers", "lazy", "legacy",
    "logging", "loss", "low_level", "low_level_zero_plugin", "lr_scheduler", "memory", "metric", "mixed_precision", "model",
    "model_wrapper", "modeling", "moe", "moe_context", "naive_amp", "nn", "one_d_layer", "optimizer", "p2p", "parallel",
    "parallel_1d", "parallel_2d", "parallel_2p5d", "parallel_3d", "parallel_context", "parallel_layers", "parallel_mode",
    "parallel_sequence", "parallelmode", "pipelinable", "pipeline", "plugin", "plugin_base", "policies", "process_group",
    "process_group_mesh", "profiler", "pytorch", "random", "registry", "schedule", "shard", "shard_utils",
    "sharded_init_context", "sharded_model", "sharded_model_v2", "sharded_optim", "shardformer", "stage_manager", "tensor",
    "testing", "timer", "torch_amp", "torch_ddp_plugin", "torch_fsdp_plugin", "trainer", "utils", "vanilla",
    "wrapped_layers", "wrapper", "zero",
})  # fmt: skip
"""What the paths there consist of."""


def find(name: str, module: str, homes: dict[str, str]) -> Any:
    """A name of theirs, asked of one of their modules.

    Args:
        name: asked for.
        module: full name of the module.
        homes: where the names are that there are.

    Raises:
        AttributeError: for a name of Python's own.
        ImportError: for every other name that there is not: with what to write.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if name in homes:
        return getattr(import_module(homes[name]), name)
    instead = instead_of(name)
    if instead is not None:
        raise ImportError(f"there is no {name} here; write {instead}", name=module)
    if name in PARTS:
        return import_module(f"{module}.{name}")
    is_ours = module == HERE and (Path(__file__).parent / f"{name}.py").exists()
    if is_ours:  # Python imports it when it hears this
        raise AttributeError(name)
    raise ImportError(f"{module} has no {name!r}.{did_you_mean(name, homes)} {_PAGE}", name=module)


class _Paths(MetaPathFinder, Loader):
    """Makes the modules."""

    def __init__(self, homes: dict[str, str]) -> None:
        self._homes = homes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """One of their modules that is not one of ours.

        Raises:
            ModuleNotFoundError: for a path that they did not have either.
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
        """As Python makes them."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Names come when they are asked for."""
        module.__getattr__ = names_for(module.__name__, self._homes)  # type: ignore[method-assign]


def names_for(module: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module."""
    return partial(find, module=module, homes=homes)


def install(homes: dict[str, str]) -> None:
    """Let their paths be imported; once."""
    if not any(isinstance(finder, _Paths) for finder in sys.meta_path):
        sys.meta_path.append(_Paths(homes))  # after those that find files
