"""Names of Colossal-AI, so that coming from there is a change of imports.

``from meshfold.engine.compat import Booster, GeminiPlugin`` in place of ``from colossalai.booster import ...``. They are thin:
each makes the arguments of one :class:`meshfold.engine.Engine` of what it is given, by a table
(:mod:`meshfold.engine.compat.tables`). ``docs/migration.md`` has a row for each name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshfold.engine.compat.elsewhere import instead_of

if TYPE_CHECKING:
    from meshfold.engine.compat.amp import AMP_TYPE
    from meshfold.engine.compat.arguments import MigrationNote
    from meshfold.engine.compat.booster import Booster
    from meshfold.engine.compat.config import Config
    from meshfold.engine.compat.context import (
        ParallelMode,
        gpc,
        launch,
        launch_from_openmpi,
        launch_from_slurm,
        launch_from_torch,
    )
    from meshfold.engine.compat.contexts import (
        BucketTensorShardStrategy,
        ColoInitContext,
        LazyInitContext,
        TensorShardStrategy,
        ZeroInitContext,
    )
    from meshfold.engine.compat.coordinator import DistCoordinator
    from meshfold.engine.compat.deepspeed import from_deepspeed
    from meshfold.engine.compat.making import initialize
    from meshfold.engine.compat.plugins import (
        GeminiPlugin,
        HybridParallelPlugin,
        LowLevelZeroPlugin,
        TorchDDPPlugin,
        TorchFSDPPlugin,
    )
    from meshfold.engine.compat.sampling import get_dataloader
    from meshfold.engine.compat.script_tools import (
        DistributedLogger,
        disable_existing_loggers,
        get_current_device,
        get_default_parser,
        get_dist_logger,
        is_using_ddp,
        is_using_pp,
    )
    from meshfold.engine.compat.training import TrainingEngine
    from meshfold.engine.compat.warm_ups import CosineAnnealingWarmupLR, LinearWarmupLR
    from meshfold.zero_gemini import CPUAdam, HybridAdam

__all__ = [
    "AMP_TYPE",
    "Booster",
    "BucketTensorShardStrategy",
    "CPUAdam",
    "ColoInitContext",
    "Config",
    "CosineAnnealingWarmupLR",
    "DistCoordinator",
    "DistributedLogger",
    "GeminiPlugin",
    "HybridAdam",
    "HybridParallelPlugin",
    "LazyInitContext",
    "LinearWarmupLR",
    "LowLevelZeroPlugin",
    "MigrationNote",
    "ParallelMode",
    "TensorShardStrategy",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "TrainingEngine",
    "ZeroInitContext",
    "disable_existing_loggers",
    "from_deepspeed",
    "get_current_device",
    "get_dataloader",
    "get_default_parser",
    "get_dist_logger",
    "gpc",
    "initialize",
    "is_using_ddp",
    "is_using_pp",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]

_HERE = "meshfold.engine.compat."
_HOMES = {
    "AMP_TYPE": f"{_HERE}amp",
    "Booster": f"{_HERE}booster",
    "BucketTensorShardStrategy": f"{_HERE}contexts",
    "CPUAdam": "meshfold.zero_gemini",
    "ColoInitContext": f"{_HERE}contexts",
    "Config": f"{_HERE}config",
    "CosineAnnealingWarmupLR": f"{_HERE}warm_ups",
    "DistCoordinator": f"{_HERE}coordinator",
    "DistributedLogger": f"{_HERE}script_tools",
    "GeminiPlugin": f"{_HERE}plugins",
    "HybridAdam": "meshfold.zero_gemini",
    "HybridParallelPlugin": f"{_HERE}plugins",
    "LazyInitContext": f"{_HERE}contexts",
    "LinearWarmupLR": f"{_HERE}warm_ups",
    "LowLevelZeroPlugin": f"{_HERE}plugins",
    "MigrationNote": f"{_HERE}arguments",
    "ParallelMode": f"{_HERE}context",
    "TensorShardStrategy": f"{_HERE}contexts",
    "TorchDDPPlugin": f"{_HERE}plugins",
    "TorchFSDPPlugin": f"{_HERE}plugins",
    "TrainingEngine": f"{_HERE}training",
    "ZeroInitContext": f"{_HERE}contexts",
    "disable_existing_loggers": f"{_HERE}script_tools",
    "from_deepspeed": f"{_HERE}deepspeed",
    "get_current_device": f"{_HERE}script_tools",
    "get_dataloader": f"{_HERE}sampling",
    "get_default_parser": f"{_HERE}script_tools",
    "get_dist_logger": f"{_HERE}script_tools",
    "gpc": f"{_HERE}context",
    "initialize": f"{_HERE}making",
    "is_using_ddp": f"{_HERE}script_tools",
    "is_using_pp": f"{_HERE}script_tools",
    "launch": f"{_HERE}context",
    "launch_from_openmpi": f"{_HERE}context",
    "launch_from_slurm": f"{_HERE}context",
    "launch_from_torch": f"{_HERE}context",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for; say what to write for one of theirs that is not here.

    Raises:
        ImportError: for a name of theirs that is not here: with what to write.
    """
    if name not in _HOMES:
        if (instead := instead_of(name)) is not None:
            raise ImportError(f"there is no {name} here; write {instead}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
