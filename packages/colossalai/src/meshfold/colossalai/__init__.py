"""Names of Colossal-AI, so that coming from there is a change of imports.

``from meshfold.colossalai import Booster, GeminiPlugin`` in place of ``from colossalai.booster import ...``. They are thin:
each makes the arguments of one :class:`meshfold.engine.Engine` of what it is given, by a table
(:mod:`meshfold.colossalai.tables`). ``docs/migration.md`` has a row for each name. Paths of submodules do too:
``from meshfold.colossalai.nn.optimizer import HybridAdam`` (:mod:`meshfold.colossalai.submodules`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshfold.colossalai.submodules import install, names_for

if TYPE_CHECKING:
    from meshfold.colossalai.accelerator import Accelerator, get_accelerator
    from meshfold.colossalai.adams import CPUAdam, HybridAdam
    from meshfold.colossalai.amp import AMP_TYPE
    from meshfold.colossalai.arguments import MigrationNote
    from meshfold.colossalai.booster import Booster
    from meshfold.colossalai.config import Config
    from meshfold.colossalai.context import (
        ParallelContext,
        ParallelMode,
        global_context,
        gpc,
        launch,
        launch_from_openmpi,
        launch_from_slurm,
        launch_from_torch,
    )
    from meshfold.colossalai.coordinator import DistCoordinator
    from meshfold.colossalai.deepspeed import from_deepspeed
    from meshfold.colossalai.init_contexts import (
        BucketTensorShardStrategy,
        ColoInitContext,
        LazyInitContext,
        TensorShardStrategy,
        ZeroInitContext,
    )
    from meshfold.colossalai.make_engine import initialize
    from meshfold.colossalai.mesh_views import ProcessGroupMesh
    from meshfold.colossalai.plugins import (
        DPPluginBase,
        GeminiPlugin,
        HybridParallelPlugin,
        LowLevelZeroPlugin,
        Plugin,
        TorchDDPPlugin,
        TorchFSDPPlugin,
    )
    from meshfold.colossalai.sampling import get_dataloader
    from meshfold.colossalai.script_tools import (
        DistributedLogger,
        disable_existing_loggers,
        get_current_device,
        get_default_parser,
        get_dist_logger,
        is_using_ddp,
        is_using_pp,
    )
    from meshfold.colossalai.training import TrainingEngine
    from meshfold.colossalai.warm_ups import CosineAnnealingWarmupLR, LinearWarmupLR

__all__ = [
    "AMP_TYPE",
    "Accelerator",
    "Booster",
    "BucketTensorShardStrategy",
    "CPUAdam",
    "ColoInitContext",
    "Config",
    "CosineAnnealingWarmupLR",
    "DPPluginBase",
    "DistCoordinator",
    "DistributedLogger",
    "GeminiPlugin",
    "HybridAdam",
    "HybridParallelPlugin",
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

_HERE = "meshfold.colossalai."
_HOMES = {
    "Accelerator": f"{_HERE}accelerator",
    "get_accelerator": f"{_HERE}accelerator",
    "global_context": f"{_HERE}context",
    "ParallelContext": f"{_HERE}context",
    "DPPluginBase": f"{_HERE}plugins",
    "Plugin": f"{_HERE}plugins",
    "ProcessGroupMesh": f"{_HERE}mesh_views",
    "AMP_TYPE": f"{_HERE}amp",
    "Booster": f"{_HERE}booster",
    "BucketTensorShardStrategy": f"{_HERE}init_contexts",
    "CPUAdam": f"{_HERE}adams",
    "ColoInitContext": f"{_HERE}init_contexts",
    "Config": f"{_HERE}config",
    "CosineAnnealingWarmupLR": f"{_HERE}warm_ups",
    "DistCoordinator": f"{_HERE}coordinator",
    "DistributedLogger": f"{_HERE}script_tools",
    "GeminiPlugin": f"{_HERE}plugins",
    "HybridAdam": f"{_HERE}adams",
    "HybridParallelPlugin": f"{_HERE}plugins",
    "LazyInitContext": f"{_HERE}init_contexts",
    "LinearWarmupLR": f"{_HERE}warm_ups",
    "LowLevelZeroPlugin": f"{_HERE}plugins",
    "MigrationNote": f"{_HERE}arguments",
    "ParallelMode": f"{_HERE}context",
    "TensorShardStrategy": f"{_HERE}init_contexts",
    "TorchDDPPlugin": f"{_HERE}plugins",
    "TorchFSDPPlugin": f"{_HERE}plugins",
    "TrainingEngine": f"{_HERE}training",
    "ZeroInitContext": f"{_HERE}init_contexts",
    "disable_existing_loggers": f"{_HERE}script_tools",
    "from_deepspeed": f"{_HERE}deepspeed",
    "get_current_device": f"{_HERE}script_tools",
    "get_dataloader": f"{_HERE}sampling",
    "get_default_parser": f"{_HERE}script_tools",
    "get_dist_logger": f"{_HERE}script_tools",
    "gpc": f"{_HERE}context",
    "initialize": f"{_HERE}make_engine",
    "is_using_ddp": f"{_HERE}script_tools",
    "is_using_pp": f"{_HERE}script_tools",
    "launch": f"{_HERE}context",
    "launch_from_openmpi": f"{_HERE}context",
    "launch_from_slurm": f"{_HERE}context",
    "launch_from_torch": f"{_HERE}context",
}


__version__ = "0.5.0"
"""The version of Colossal-AI whose names these are."""

__getattr__ = names_for(__name__, _HOMES)
install(_HOMES)
