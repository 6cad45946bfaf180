"""Names of Colossal-AI, so that its scripts only need other imports.

``from meshfold.colossalai import Booster, GeminiPlugin`` in place of ``from colossalai.booster import ...``. They are thin:
each translates its arguments to those of one :class:`meshfold.engine.Engine`, by a table
(:mod:`meshfold.colossalai.tables`). ``docs/migration.md`` has a row for each name. Paths of submodules also work:
``from meshfold.colossalai.nn.optimizer import HybridAdam`` (:mod:`meshfold.colossalai.submodules`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshfold.colossalai.submodules import install, names_for

if TYPE_CHECKING:
    from meshfold.colossalai.adam_classes import CPUAdam, HybridAdam
    from meshfold.colossalai.arguments import MigrationNote
    from meshfold.colossalai.booster import Booster
    from meshfold.colossalai.context import (
        ParallelContext,
        ParallelMode,
        ProcessGroupMesh,
        global_context,
        gpc,
        launch,
        launch_from_openmpi,
        launch_from_slurm,
        launch_from_torch,
    )
    from meshfold.colossalai.deepspeed import from_deepspeed
    from meshfold.colossalai.galore_classes import DistGaloreAwamW, GaLoreAdamW8bit, get_galore_param_groups
    from meshfold.colossalai.init_contexts import (
        BucketTensorShardStrategy,
        ColoInitContext,
        LazyInitContext,
        TensorShardStrategy,
        ZeroInitContext,
    )
    from meshfold.colossalai.loaders import get_dataloader
    from meshfold.colossalai.make_engine import initialize
    from meshfold.colossalai.optimizer_classes import (
        CAME,
        Adafactor,
        DistributedAdaFactor,
        DistributedCAME,
        DistributedLamb,
        Lamb,
        Lars,
    )
    from meshfold.colossalai.plugins import (
        DPPluginBase,
        GeminiPlugin,
        HybridParallelPlugin,
        LowLevelZeroPlugin,
        Plugin,
        TorchDDPPlugin,
        TorchFSDPPlugin,
    )
    from meshfold.colossalai.schedulers import CosineAnnealingWarmupLR, LinearWarmupLR
    from meshfold.colossalai.script_tools import (
        Accelerator,
        DistCoordinator,
        DistributedLogger,
        disable_existing_loggers,
        get_accelerator,
        get_current_device,
        get_default_parser,
        get_dist_logger,
        is_using_ddp,
        is_using_pp,
    )
    from meshfold.colossalai.settings import AMP_TYPE, Config
    from meshfold.colossalai.training import TrainingEngine

__all__ = [
    "AMP_TYPE",
    "CAME",
    "Accelerator",
    "Adafactor",
    "Booster",
    "BucketTensorShardStrategy",
    "CPUAdam",
    "ColoInitContext",
    "Config",
    "CosineAnnealingWarmupLR",
    "DPPluginBase",
    "DistCoordinator",
    "DistGaloreAwamW",
    "DistributedAdaFactor",
    "DistributedCAME",
    "DistributedLamb",
    "DistributedLogger",
    "GaLoreAdamW8bit",
    "GeminiPlugin",
    "HybridAdam",
    "HybridParallelPlugin",
    "Lamb",
    "Lars",
    "LazyInitContext",
    "LinearWarmupLR",
    "LowLevelZeroPlugin",
    "MigrationNote",
    "ParallelContext",
    "ParallelMode",
    "Plugin",
    "ProcessGroupMesh",
    "TensorShardStrategy",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "TrainingEngine",
    "ZeroInitContext",
    "disable_existing_loggers",
    "from_deepspeed",
    "get_accelerator",
    "get_current_device",
    "get_dataloader",
    "get_default_parser",
    "get_dist_logger",
    "get_galore_param_groups",
    "global_context",
    "gpc",
    "initialize",
    "is_using_ddp",
    "is_using_pp",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]

_MODULES = {
    "adam_classes": (
        "CPUAdam",
        "HybridAdam",
    ),
    "arguments": ("MigrationNote",),
    "booster": ("Booster",),
    "context": (
        "ParallelContext",
        "ParallelMode",
        "ProcessGroupMesh",
        "global_context",
        "gpc",
        "launch",
        "launch_from_openmpi",
        "launch_from_slurm",
        "launch_from_torch",
    ),
    "deepspeed": ("from_deepspeed",),
    "galore_classes": (
        "DistGaloreAwamW",
        "GaLoreAdamW8bit",
        "get_galore_param_groups",
    ),
    "init_contexts": (
        "BucketTensorShardStrategy",
        "ColoInitContext",
        "LazyInitContext",
        "TensorShardStrategy",
        "ZeroInitContext",
    ),
    "loaders": ("get_dataloader",),
    "make_engine": ("initialize",),
    "optimizer_classes": (
        "CAME",
        "Adafactor",
        "DistributedAdaFactor",
        "DistributedCAME",
        "DistributedLamb",
        "Lamb",
        "Lars",
    ),
    "plugins": (
        "DPPluginBase",
        "GeminiPlugin",
        "HybridParallelPlugin",
        "LowLevelZeroPlugin",
        "Plugin",
        "TorchDDPPlugin",
        "TorchFSDPPlugin",
    ),
    "schedulers": (
        "CosineAnnealingWarmupLR",
        "LinearWarmupLR",
    ),
    "script_tools": (
        "Accelerator",
        "DistCoordinator",
        "DistributedLogger",
        "disable_existing_loggers",
        "get_accelerator",
        "get_current_device",
        "get_default_parser",
        "get_dist_logger",
        "is_using_ddp",
        "is_using_pp",
    ),
    "settings": (
        "AMP_TYPE",
        "Config",
    ),
    "training": ("TrainingEngine",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


__version__ = "0.5.0"
"""The version of Colossal-AI whose names these are."""

__getattr__ = names_for(__name__, _HOMES)
install(_HOMES)
