"""What lives where for a whole step: GPU, host or disk, planned before it runs.

>>> workload = stack(machine=H200, layers=32, layer_elems=200_000_000, tokens=16 * 1024, working_bytes=4 * GiB)
>>> made = plan(workload, H200, Limits(gpu_bytes=40 * GiB))
>>> made.peak_gpu_bytes <= 40 * GiB, made.proved
(True, False)

``print(made)`` is a table, ``draw(made, "plan.svg")`` a picture, ``chrome_trace(made)`` for chrome://tracing.
"""

from meshfold.zero_gemini.planner.options import STRATEGIES
from meshfold.zero_gemini.planner.policies import const, cpu, cuda, exhaustive, on_device, plan, static
from meshfold.zero_gemini.planner.rates import EMULATED, H200, GiB, KiB, Machine, MiB
from meshfold.zero_gemini.planner.refuse import DoesNotFit
from meshfold.zero_gemini.planner.result import ChunkPlan, LayerPlan, Plan, Term
from meshfold.zero_gemini.planner.timeline import Moment, chrome_trace, draw, timeline
from meshfold.zero_gemini.planner.workload import REGIMES, ChunkCost, Layer, Limits, Regime, Workload, stack

__all__ = [
    "EMULATED",
    "H200",
    "REGIMES",
    "STRATEGIES",
    "ChunkCost",
    "ChunkPlan",
    "DoesNotFit",
    "GiB",
    "KiB",
    "Layer",
    "LayerPlan",
    "Limits",
    "Machine",
    "MiB",
    "Moment",
    "Plan",
    "Regime",
    "Term",
    "Workload",
    "chrome_trace",
    "const",
    "cpu",
    "cuda",
    "draw",
    "exhaustive",
    "on_device",
    "plan",
    "stack",
    "static",
    "timeline",
]
