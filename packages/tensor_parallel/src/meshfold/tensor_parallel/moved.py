"""Names of version 0.1 that moved: each works for one minor version, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from typing import Any

from meshfold.tensor_parallel.cost import Cost
from meshfold.tensor_parallel.lowerings import matmul_cost
from meshfold.tensor_parallel.plan import MatmulPlan


def _cost(self: MatmulPlan, *args: Any, **kwargs: Any) -> Cost:
    """Return ``matmul_cost(plan, ...)``, which took this method's place."""
    warnings.warn(
        "MatmulPlan.cost(...) is now a function: write matmul_cost(plan, ...)",
        DeprecationWarning,
        stacklevel=2,
    )
    return matmul_cost(self, *args, **kwargs)


def install() -> None:
    """Give plans the method ``cost``. It is not in the class: a plan does not import how it is carried out."""
    MatmulPlan.cost = _cost  # type: ignore[attr-defined]
