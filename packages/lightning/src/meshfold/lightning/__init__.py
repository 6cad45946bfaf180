"""Lightning: ``Trainer(strategy="meshfold")``, or ``strategy=MeshfoldStrategy(parallel=dict(...))``.

Importing this package registers the names ``meshfold`` and ``colossalai`` with the trainer. It needs the extra
``meshfold[lightning]``; nothing else of Meshfold imports it.
"""

from __future__ import annotations

try:
    import lightning.pytorch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"meshfold.lightning needs Lightning ({error}): pip install 'meshfold[lightning]'",
        name=error.name,
    ) from error

from lightning.pytorch.strategies import StrategyRegistry
from meshfold.lightning.checkpoints import consolidate
from meshfold.lightning.colossalai import ColossalAIStrategy
from meshfold.lightning.environment import RunningRanks
from meshfold.lightning.named_optimizer import named_optimizer
from meshfold.lightning.precision import MeshfoldPrecision
from meshfold.lightning.strategy import MeshfoldStrategy

__all__ = [
    "ColossalAIStrategy",
    "MeshfoldPrecision",
    "MeshfoldStrategy",
    "RunningRanks",
    "consolidate",
    "named_optimizer",
]

MeshfoldStrategy.register_strategies(StrategyRegistry)
ColossalAIStrategy.register_strategies(StrategyRegistry)
