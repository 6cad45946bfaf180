"""Plans of memory: live tensors counted on meta tensors, and the choice of chunks and recomputation under a limit."""

from __future__ import annotations

from meshfold.folding.planning.limit import MemoryLimit
from meshfold.folding.planning.plan import MemoryPlan, MemoryPlanError, longest_chain, plan_memory

__all__ = ["MemoryLimit", "MemoryPlan", "MemoryPlanError", "longest_chain", "plan_memory"]
