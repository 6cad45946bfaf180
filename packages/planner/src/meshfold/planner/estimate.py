"""Old path of :mod:`meshfold.planner.estimates`, with a DeprecationWarning."""

from __future__ import annotations

import warnings

from meshfold.planner.estimates import Estimate, Memory, Times, Traffic
from meshfold.planner.estimates import step_times as times

__all__ = ["Estimate", "Memory", "Times", "Traffic", "times"]

warnings.warn(
    f"{__name__} is now meshfold.planner.estimates: write from meshfold.planner import ...",
    DeprecationWarning,
    stacklevel=2,
)
