"""Rates and memory of this machine: measured by samples, corrected by training steps."""

from __future__ import annotations

from meshfold.zero_gemini.machine_rates.samples import (
    UNLIMITED_BYTES,
    available_device_bytes,
    available_host_bytes,
    measure_machine,
    measure_rank_rates,
    resident_bytes,
    slowest,
    with_observed_rates,
)

__all__ = [
    "UNLIMITED_BYTES",
    "available_device_bytes",
    "available_host_bytes",
    "measure_machine",
    "measure_rank_rates",
    "resident_bytes",
    "slowest",
    "with_observed_rates",
]
