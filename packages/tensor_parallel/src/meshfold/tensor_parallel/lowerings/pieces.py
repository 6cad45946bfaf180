"""What stream and ring share: the three products, pieces of them, and sums of pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshfold.mesh import Mesh

if TYPE_CHECKING:
    from meshfold.tensor_parallel.plan import MatmulPlan, Operand

INPUTS: dict[Operand, tuple[Operand, Operand]] = {"y": ("x", "w"), "x": ("y", "w"), "w": ("y", "x")}
"""What each product multiplies, by what it makes: y, dx (``"x"``) or dw (``"w"``); there ``"y"`` means dy."""


def stored_dims(plan: MatmulPlan, operand: Operand) -> tuple[str, str]:
    """The dims of an operand as it lies in memory: x is ``[m, k]``, w is ``[n, k]``, y is ``[m, n]``."""
    return {"x": (plan.m, plan.k), "w": (plan.n, plan.k), "y": (plan.m, plan.n)}[operand]


def tensor_dim(plan: MatmulPlan, operand: Operand, dim: str) -> int:
    """Where a named dim lies in an operand's tensor."""
    return stored_dims(plan, operand).index(dim)


def factors(out: Operand, tensors: Mapping[Operand, Tensor]) -> tuple[Tensor, Tensor]:
    """(a, b) with ``out = a @ b``: ``y = x wᵀ``, ``dx = dy w``, ``dw = dyᵀ x``; w and dw lie as ``[n, k]``."""
    if out == "y":
        return tensors["x"], tensors["w"].t()
    if out == "x":
        return tensors["y"], tensors["w"]
    return tensors["y"].t(), tensors["x"]


def split_axes(plan: MatmulPlan, mesh: Mesh, operand: Operand) -> tuple[str, ...]:
    """The axes of an operand's extras that are larger than 1, major first."""
    return tuple(axis for _, axis in plan.extras(operand) if mesh.size(axis) > 1)


def split_dims(plan: MatmulPlan, mesh: Mesh, operand: Operand) -> set[str]:
    """The dims along which an operand is really gathered or scattered."""
    return {dim for dim, axis in plan.extras(operand) if mesh.size(axis) > 1}


def brick(plan: MatmulPlan, mesh: Mesh, x: Sequence[int], n: int) -> dict[str, int]:
    """Elements of m, k and n that this rank multiplies, from the shape of ``x [m, k]`` and the n of w at rest."""

    def times(operand: Operand, dim: str) -> int:
        return mesh.size(*(axis for d, axis in plan.extras(operand) if d == dim))

    return {
        plan.m: x[0] * times("x", plan.m),
        plan.k: x[1] * times("x", plan.k),
        plan.n: n * times("w", plan.n),
    }


class Sum:
    """A sum of matrix products. Half precision is summed in float32, so that pieces round no more than one product."""

    def __init__(self, dtype: torch.dtype) -> None:
        """``dtype``: of the terms and of the result."""
        self._dtype = dtype
        self._wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        self._total: Tensor | None = None

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b``."""
        half = self._wide != self._dtype
        if half and not a.is_cuda:  # where only CUDA multiplies half precision to float32
            a, b, half = a.to(self._wide), b.to(self._wide), False
        if self._total is None:
            self._total = torch.mm(a, b, out_dtype=self._wide) if half else a @ b
        elif not half:
            self._total.addmm_(a, b)
        elif torch.compiler.is_compiling():  # which knows out_dtype for mm alone
            self._total = self._total + torch.mm(a, b, out_dtype=self._wide)
        else:
            self._total = torch.addmm(self._total, a, b, out_dtype=self._wide)

    def done(self) -> Tensor:
        """The sum, in the dtype of its terms; there is at least one."""
        if self._total is None:
            raise ValueError("a sum of no products")
        return self._total.to(self._dtype)
