"""Names of Colossal-AI, so that coming from there is a change of imports.

``from meshfold.engine.compat import Booster, GeminiPlugin`` in place of ``from colossalai.booster import ...``. They are thin:
each makes the arguments of one :class:`meshfold.engine.Engine` of what it is given, by a table
(:mod:`meshfold.engine.compat.tables`). ``docs/migration.md`` has a row for each name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshfold.engine.compat.elsewhere import ELSEWHERE

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
    from meshfold.engine.compat.training import TrainingEngine
    from meshfold.zero_gemini import CPUAdam, HybridAdam

__all__ = [
    "AMP_TYPE",
    "Booster",
    "BucketTensorShardStrategy",
    "CPUAdam",
    "ColoInitContext",
    "Config",
    "DistCoordinator",
    "GeminiPlugin",
    "HybridAdam",
    "HybridParallelPlugin",
    "LazyInitContext",
    "LowLevelZeroPlugin",
    "MigrationNote",
    "ParallelMode",
    "TensorShardStrategy",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "TrainingEngine",
    "ZeroInitContext",
    "from_deepspeed",
    "get_dataloader",
    "gpc",
    "initialize",
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
    "DistCoordinator": f"{_HERE}coordinator",
    "GeminiPlugin": f"{_HERE}plugins",
    "HybridAdam": "meshfold.zero_gemini",
    "HybridParallelPlugin": f"{_HERE}plugins",
    "LazyInitContext": f"{_HERE}contexts",
    "LowLevelZeroPlugin": f"{_HERE}plugins",
    "MigrationNote": f"{_HERE}arguments",
    "ParallelMode": f"{_HERE}context",
    "TensorShardStrategy": f"{_HERE}contexts",
    "TorchDDPPlugin": f"{_HERE}plugins",
    "TorchFSDPPlugin": f"{_HERE}plugins",
    "TrainingEngine": f"{_HERE}training",
    "ZeroInitContext": f"{_HERE}contexts",
    "from_deepspeed": f"{_HERE}deepspeed",
    "get_dataloader": f"{_HERE}sampling",
    "gpc": f"{_HERE}context",
    "initialize": f"{_HERE}making",
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
    if name in ELSEWHERE:
        raise ImportError(f"there is no {name} here; write {ELSEWHERE[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
