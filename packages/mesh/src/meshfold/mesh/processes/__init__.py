"""Processes of a job: start local ranks, take part in a job, make process groups."""

from __future__ import annotations

from meshfold.mesh.processes._bootstrap import STOPPED_CODE, refusal_sentence, run_program
from meshfold.mesh.processes.environment import Environment, watchdog_settings
from meshfold.mesh.processes.groups import (
    RunningWorld,
    create_group,
    ended_ranks,
    group_count,
    group_name,
    is_simulated,
    is_started,
    own_store,
    running_world,
)
from meshfold.mesh.processes.host_numbers import start_copying, start_largest, start_reading
from meshfold.mesh.processes.launcher import launch, launch_node, usable_cores
from meshfold.mesh.processes.process_group import DEFAULT_TIMEOUT, Process, start, start_fake
from meshfold.mesh.processes.sub_world import only_ranks

__all__ = [
    "DEFAULT_TIMEOUT",
    "STOPPED_CODE",
    "Environment",
    "Process",
    "RunningWorld",
    "create_group",
    "ended_ranks",
    "group_count",
    "group_name",
    "is_simulated",
    "is_started",
    "launch",
    "launch_node",
    "only_ranks",
    "own_store",
    "refusal_sentence",
    "run_program",
    "running_world",
    "start",
    "start_copying",
    "start_fake",
    "start_largest",
    "start_reading",
    "usable_cores",
    "watchdog_settings",
]
