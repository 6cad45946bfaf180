"""ZeRO: states in chunks that data ranks share, planned and placed."""

from __future__ import annotations

from meshfold.engine.zero.device_limit import USUAL_CONTEXT_BYTES, DeviceLimit
from meshfold.engine.zero.kept_state import kept_state
from meshfold.engine.zero.measured_plans import InFlight, workload_in_flight
from meshfold.engine.zero.memory import PROCESS_BYTES, largest_output
from meshfold.engine.zero.plan import limits_of, plan_for, regime_of
from meshfold.engine.zero.states import ZeroStates

__all__ = [
    "PROCESS_BYTES",
    "USUAL_CONTEXT_BYTES",
    "DeviceLimit",
    "InFlight",
    "ZeroStates",
    "kept_state",
    "largest_output",
    "limits_of",
    "plan_for",
    "regime_of",
    "workload_in_flight",
]
