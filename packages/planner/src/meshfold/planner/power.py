"""A machine whose devices have a power cap: clocks are lower, so matmuls take longer; memory and links are unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshfold.mesh import SpecError
from meshfold.planner.machines import Machine

POWER_W: Mapping[str, float] = {"H200": 700.0, "H100": 700.0, "A100": 400.0, "V100": 300.0}
"""Power limit of a GPU by its data sheet, W (modules for boards with NVLink)."""
_IDLE = 0.1  # share of the limit that a GPU takes without work


def under_power_cap(machine: Machine, watts: float) -> Machine:
    """Return the machine with a power cap for each device.

    The power of computing grows with the third power of the clock, since voltage rises with it. A machine's rates are those at the
    limit of the data sheet, which long training reaches. This is a rule, not a measurement: ``meshfold calibrate`` on a capped GPU
    measures its rates.

    Args:
        machine: of a known kind of GPU.
        watts: that a device may take, below its own limit.

    Raises:
        SpecError: for a machine whose limit is not known, and for a cap at or below the idle power, or above the limit.
    """
    limit = next((power for kind, power in POWER_W.items() if kind in machine.name.upper()), None)
    if limit is None:
        raise SpecError(
            f"power_cap={watts:g}: the power limit of {machine.name} is not known. Known: {', '.join(POWER_W)}; measure a capped "
            "machine with meshfold calibrate"
        )
    idle = _IDLE * limit
    if not idle < watts <= limit:
        raise SpecError(
            f"power_cap={watts:g} must be above {idle:g} W, which a device of {machine.name} takes idle, and at most {limit:g} W"
        )
    clock = ((watts - idle) / (limit - idle)) ** (1 / 3)
    return replace(
        machine,
        name=f"{machine.name} at {watts:g} W",
        flops={precision: clock * rate for precision, rate in machine.flops.items()},
    )
