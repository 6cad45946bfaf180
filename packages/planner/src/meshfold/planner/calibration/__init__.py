"""The machine at hand, measured: rates of its devices, links by α–β, host and disk, as a :class:`meshfold.planner.Machine`."""

from __future__ import annotations

from meshfold.planner.calibration.fits import (
    MatmulSample,
    MessageSample,
    fit_line,
    fit_link,
    fit_links,
    matmul_rates,
    matmul_shares,
    measured_link,
    seconds_by_size,
    typical_link,
)
from meshfold.planner.calibration.measure import Calibration, calibrate
from meshfold.planner.calibration.samples import pace_of
from meshfold.planner.calibration.text import calibration_table
from meshfold.planner.calibration.timing import TINY, Effort
from meshfold.planner.machine_files import read_machine, write_machine

__all__ = [
    "TINY",
    "Calibration",
    "Effort",
    "MatmulSample",
    "MessageSample",
    "calibrate",
    "calibration_table",
    "fit_line",
    "fit_link",
    "fit_links",
    "matmul_rates",
    "matmul_shares",
    "measured_link",
    "pace_of",
    "read_machine",
    "seconds_by_size",
    "typical_link",
    "write_machine",
]
