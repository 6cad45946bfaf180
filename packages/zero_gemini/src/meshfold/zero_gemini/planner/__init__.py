"""Plans of where parameters and state live for a whole step (GPU, host or disk), made before it runs.

>>> def chunk(i):
...     uses = dict(forward=(i, i), backward=(7 - i, 7 - i), forward_seconds=0.05, backward_seconds=0.1)
...     return ChunkCost(name=f"layer{i}", elems=10**9, gathered_elems=10**9, **uses)
>>> step = dict(non_model_bytes=(GiB,) * 8, forward_timesteps=4, tokens=16 * 1024)
>>> workload = Workload(
...     name="four layers", chunks=tuple(chunk(i) for i in range(4)), regime=REGIMES["A"], clipping=True, **step
... )
>>> made = plan(workload, H200, Limits(gpu_bytes=40 * GiB))
>>> made.peak_gpu_bytes <= 40 * GiB, made.proved
(True, True)

``print(made)`` is a table, ``draw(made, "plan.svg")`` a picture, ``chrome_trace(made)`` for chrome://tracing.
"""

from __future__ import annotations

import warnings
from typing import Any

from meshfold.zero_gemini.planner.memory import gather_windows
from meshfold.zero_gemini.planner.observed import Part, timed, typical_parts
from meshfold.zero_gemini.planner.options import (
    SPECULATIVE_STEP,
    SPLIT_STEP,
    SPLIT_STEP_ON_DEVICE,
    STRATEGIES,
)
from meshfold.zero_gemini.planner.policies import (
    automatic,
    const,
    cpu,
    cuda,
    evaluate_placement,
    exhaustive,
    on_device,
    plan,
    static,
)
from meshfold.zero_gemini.planner.rates import H200, GiB, KiB, Machine, MiB
from meshfold.zero_gemini.planner.refuse import DoesNotFit
from meshfold.zero_gemini.planner.regimes import REGIMES, Regime, gradient_dtype
from meshfold.zero_gemini.planner.result import ChunkPlan, LayerPlan, Plan, Term, recost
from meshfold.zero_gemini.planner.timeline import Timestep, chrome_trace, draw, timeline
from meshfold.zero_gemini.planner.workload import ChunkCost, Layer, Limits, Workload


def __getattr__(name: str) -> Any:
    """Return the class that version 0.1 called ``Moment``, with a DeprecationWarning."""
    if name != "Moment":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.Moment is now {__name__}.Timestep: change the import", DeprecationWarning, stacklevel=2)
    return Timestep


__all__ = [
    "H200",
    "REGIMES",
    "SPECULATIVE_STEP",
    "SPLIT_STEP",
    "SPLIT_STEP_ON_DEVICE",
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
    "Part",
    "Plan",
    "Regime",
    "Term",
    "Timestep",
    "Workload",
    "automatic",
    "chrome_trace",
    "const",
    "cpu",
    "cuda",
    "draw",
    "evaluate_placement",
    "exhaustive",
    "gather_windows",
    "gradient_dtype",
    "on_device",
    "plan",
    "recost",
    "static",
    "timed",
    "timeline",
    "typical_parts",
]
