"""Long runs: stop on request, resume, and find where numbers stop being finite."""

from __future__ import annotations

from meshfold.engine.long_runs.resuming import refit
from meshfold.engine.long_runs.stopping import GracefulStop

__all__ = ["GracefulStop", "refit"]
