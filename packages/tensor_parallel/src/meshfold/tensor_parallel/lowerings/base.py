"""What a lowering is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from meshfold.mesh import Mesh
from meshfold.tensor_parallel.cost import Cost

if TYPE_CHECKING:
    from meshfold.tensor_parallel.plan import MatmulPlan, Phase


class Lowering(Protocol):
    """A way to carry out a matmul plan. Tensors are two-dimensional; the weight lies as ``[n, k]``."""

    def refuses(self, plan: MatmulPlan) -> str:
        """Why the plan cannot be carried out this way; empty if it can."""
        ...

    def prepare(self, plan: MatmulPlan, mesh: Mesh) -> None:
        """Make the process groups it needs beside the plan's own, if processes are running."""
        ...

    def forward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, keep: frozenset[str]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``x [m, k]``, ``w [n, k]`` local at rest -> (``y [m, n]`` local at rest, gathered x, gathered w).

        A gathered operand is returned if ``keep`` names it, for backward to reuse.
        """
        ...

    def backward(
        self,
        plan: MatmulPlan,
        mesh: Mesh,
        x: Tensor,
        w: Tensor,
        dy: Tensor,
        *,
        wants: tuple[bool, bool],
        kept: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor | None, Tensor | None]:
        """(``dx``, ``dw``) at rest, each if wanted, from ``dy`` at rest."""
        ...

    def cost(
        self,
        plan: MatmulPlan,
        sizes: Mapping[str, int],
        mesh: Mesh,
        *,
        itemsize: int,
        phases: tuple[Phase, ...],
        keep: frozenset[str],
    ) -> Cost:
        """Every collective that forward and backward issue."""
        ...
