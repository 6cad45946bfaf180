"""Lowerings: three ways to carry out the same plan, and one that chooses among them.

========== ===================================================================== ================================
name       how                                                                   applies to
========== ===================================================================== ================================
gather     gather the operands, one matmul, scatter the result                   every plan
stream     SUMMA: broadcast one panel of k at a time, accumulate, double-buffer  plans whose gathers all run along k
ring       pass blocks round the ring under partial matmuls                      plans with a gather or scatter
auto       whichever of them :func:`choose` expects to be fastest                every plan
========== ===================================================================== ================================

All give the same result to rounding. A lowering is an object with ``refuses``, ``forward``, ``backward`` and
``cost``; see :class:`meshfold.tensor_parallel.lowerings.base.Lowering`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshfold.mesh import LayoutError, did_you_mean
from meshfold.tensor_parallel.lowerings.base import Lowering
from meshfold.tensor_parallel.lowerings.select import WAYS, Auto, choose

if TYPE_CHECKING:
    from meshfold.tensor_parallel.plan import MatmulPlan

LOWERINGS: dict[str, Lowering] = {**WAYS, "auto": Auto()}


def lowering(name: str, plan: MatmulPlan) -> Lowering:
    """The lowering of that name.

    Raises:
        LayoutError: if there is none of that name, or it cannot carry out the plan.
    """
    found = LOWERINGS.get(name)
    if found is None:
        raise LayoutError(
            f"no lowering {name!r}.{did_you_mean(name, LOWERINGS)} There are {', '.join(LOWERINGS)}"
        )
    reason = found.refuses(plan)
    if reason:
        raise LayoutError(f"lowering {name!r} does not apply: {reason}; use 'gather' or 'auto'")
    return found


__all__ = ["LOWERINGS", "Lowering", "choose", "lowering"]
