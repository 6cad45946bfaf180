"""Plans of memory: live tensors counted on meta tensors, and the choice of chunks and recomputation under a limit."""

from __future__ import annotations

from meshfold.folding.planning.limit import MemoryLimit
from meshfold.folding.planning.plan import MemoryPlan, MemoryPlanError, find_plan, longest_chain, plan_memory
from meshfold.folding.planning.run import FoldingRun
from meshfold.folding.planning.work import StackWork, count_work

__all__ = [
    "FoldingRun",
    "MemoryLimit",
    "MemoryPlan",
    "MemoryPlanError",
    "StackWork",
    "count_work",
    "find_plan",
    "longest_chain",
    "plan_memory",
]
