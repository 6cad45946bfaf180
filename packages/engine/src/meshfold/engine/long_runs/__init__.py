"""Long runs: stop on request, resume, and find where numbers stop being finite."""

from __future__ import annotations

from meshfold.engine.long_runs.resuming import resize_data_axis
from meshfold.engine.long_runs.stopping import GracefulStop

__all__ = ["GracefulStop", "resize_data_axis"]
