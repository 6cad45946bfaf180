"""Rates and memory of this machine: measured by samples, corrected by training steps."""

from __future__ import annotations

from meshfold.zero_gemini.machine_rates.available_memory import (
    UNLIMITED_BYTES,
    available_device_bytes,
    available_host_bytes,
    present_host_bytes,
    resident_bytes,
)
from meshfold.zero_gemini.machine_rates.host_in_use import HostInUse, measure_host_in_use
from meshfold.zero_gemini.machine_rates.observed import observed_under, with_observed_rates
from meshfold.zero_gemini.machine_rates.samples import measure_machine, measure_rank_rates
from meshfold.zero_gemini.machine_rates.step_measurements import (
    ALLOCATOR_MARGIN,
    CORRECTED_AFTER,
    TRACED_STEPS,
    WORTH_MOVING,
    StepMeasurements,
    measure_step,
    ranks_per_host,
    slowest,
)

__all__ = [
    "ALLOCATOR_MARGIN",
    "CORRECTED_AFTER",
    "TRACED_STEPS",
    "UNLIMITED_BYTES",
    "WORTH_MOVING",
    "HostInUse",
    "StepMeasurements",
    "available_device_bytes",
    "available_host_bytes",
    "measure_host_in_use",
    "measure_machine",
    "measure_rank_rates",
    "measure_step",
    "observed_under",
    "present_host_bytes",
    "ranks_per_host",
    "resident_bytes",
    "slowest",
    "with_observed_rates",
]
