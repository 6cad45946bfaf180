"""Options that change the machine of a plan: memory of devices and hosts, a power cap."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from meshfold.cli.arguments import byte_size

if TYPE_CHECKING:
    from meshfold.planner import Machine


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--gpu-memory", type=byte_size, metavar="SIZE", help="of a device, if not the machine's: 24GiB")
    parser.add_argument("--host-memory", type=byte_size, metavar="SIZE", help="of a host, if not the machine's: 125GiB")
    parser.add_argument("--power-cap", type=float, metavar="WATTS", help="of a device, below its own limit: 400")


def chosen_machine(arguments: argparse.Namespace, name: str) -> Machine:
    """Return the machine of a name or file, changed as the options say.

    Raises:
        SpecError: for an unknown machine, and a power cap that it cannot have.
    """
    from meshfold.planner import find_machine, under_power_cap

    machine = find_machine(name)
    if arguments.power_cap is not None:
        machine = under_power_cap(machine, arguments.power_cap)
    if arguments.gpu_memory is not None:
        machine = replace(machine, memory=arguments.gpu_memory)
    if arguments.host_memory is not None:
        machine = replace(machine, host=replace(machine.host, memory=arguments.host_memory))
    return machine
