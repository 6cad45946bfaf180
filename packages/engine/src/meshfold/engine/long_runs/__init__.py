"""Long runs: stop on request, resume, and find where numbers stop being finite."""

from __future__ import annotations

from meshfold.engine.long_runs.stopping import GracefulStop, resize_data_axis

__all__ = ["GracefulStop", "resize_data_axis"]
