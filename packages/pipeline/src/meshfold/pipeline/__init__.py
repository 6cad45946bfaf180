"""Pipeline parallelism: schedules as data, checked, simulated, drawn and run."""

from __future__ import annotations

from meshfold.pipeline.errors import ExampleError, ScheduleError
from meshfold.pipeline.pipeline import Pipeline
from meshfold.pipeline.runtime.partition import PartitionConfig
from meshfold.pipeline.scheduling.actions import Action, Op, Schedule
from meshfold.pipeline.scheduling.build import schedule
from meshfold.pipeline.scheduling.communication import Program, Receive, ReduceGradients, Send, communicate
from meshfold.pipeline.scheduling.costs import Costs
from meshfold.pipeline.scheduling.drawing import draw
from meshfold.pipeline.scheduling.search import search
from meshfold.pipeline.scheduling.simulation import Simulation, peak_microbatches, simulate, simulate_costs
from meshfold.pipeline.scheduling.validation import check

__all__ = [
    "Action",
    "Costs",
    "ExampleError",
    "Op",
    "PartitionConfig",
    "Pipeline",
    "Program",
    "Receive",
    "ReduceGradients",
    "Schedule",
    "ScheduleError",
    "Send",
    "Simulation",
    "check",
    "communicate",
    "draw",
    "peak_microbatches",
    "schedule",
    "search",
    "simulate",
    "simulate_costs",
]
