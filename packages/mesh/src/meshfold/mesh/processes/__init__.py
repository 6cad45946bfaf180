"""Processes of a job: start local ranks, take part in a job, make process groups."""

from __future__ import annotations

from meshfold.mesh.processes._bootstrap import STOPPED_CODE, run, sentence_of
from meshfold.mesh.processes.elastic import launch_node
from meshfold.mesh.processes.environment import Environment, watching
from meshfold.mesh.processes.groups import World, create, name_of, world
from meshfold.mesh.processes.launcher import launch
from meshfold.mesh.processes.process_group import (
    DEFAULT_TIMEOUT,
    Process,
    ended,
    group_count,
    is_started,
    start,
    start_fake,
)

__all__ = [
    "DEFAULT_TIMEOUT",
    "STOPPED_CODE",
    "Environment",
    "Process",
    "World",
    "create",
    "ended",
    "group_count",
    "is_started",
    "launch",
    "launch_node",
    "name_of",
    "run",
    "sentence_of",
    "start",
    "start_fake",
    "watching",
    "world",
]
