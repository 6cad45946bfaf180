"""Lowerings: four ways to execute the same plan, and one that chooses among three of them.

========== ===================================================================== ========================================
name       how                                                                   applies to
========== ===================================================================== ========================================
gather     gather the operands, one matmul, scatter the result                   every plan
stream     SUMMA: broadcast one panel of k at a time, accumulate, double-buffer  plans whose gathers all run along k
ring       pass blocks round the ring under partial matmuls                      plans with a gather or scatter
push       multiply rows as they arrive, push rows while others are multiplied   rows gathered or scattered over one axis
auto       whichever of the first three :func:`choose` expects to be fastest     every plan
========== ===================================================================== ========================================

All give the same result to rounding. A lowering is an object with ``refuses``, ``forward``, ``backward`` and
``cost``; see :class:`meshfold.tensor_parallel.lowerings.Lowering`.
"""

from meshfold.tensor_parallel.lowerings.common import Lowering
from meshfold.tensor_parallel.lowerings.select import (
    LOWERINGS,
    choose,
    find_lowering,
    matmul_cost,
)

__all__ = ["LOWERINGS", "Lowering", "choose", "find_lowering", "matmul_cost"]
