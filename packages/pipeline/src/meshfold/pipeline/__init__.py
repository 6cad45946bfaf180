"""Pipeline parallelism: schedules as data, checked, simulated, drawn and run."""

from __future__ import annotations

from meshfold.pipeline.actions import Action, Op, Schedule
from meshfold.pipeline.build import schedule
from meshfold.pipeline.check import check
from meshfold.pipeline.communicate import Program, Receive, ReduceGradients, Send, communicate
from meshfold.pipeline.costs import Costs
from meshfold.pipeline.errors import ScheduleError
from meshfold.pipeline.picture import draw
from meshfold.pipeline.pipeline import Pipeline
from meshfold.pipeline.search import search
from meshfold.pipeline.simulate import Simulation, simulate

__all__ = [
    "Action",
    "Costs",
    "Op",
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
    "schedule",
    "search",
    "simulate",
]
