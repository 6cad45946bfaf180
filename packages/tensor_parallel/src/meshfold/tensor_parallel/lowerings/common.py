"""The interface of a lowering, and what SUMMA and ring share: the three products and sums of partial products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from meshfold.kernels import on_gpu
from meshfold.mesh import Mesh
from meshfold.tensor_parallel.cost import Cost, CostQuery
from meshfold.tensor_parallel.plan import MatmulPlan, Operand

INPUTS: dict[Operand, tuple[Operand, Operand]] = {"y": ("x", "w"), "x": ("y", "w"), "w": ("y", "x")}
"""The operands of each product, by its result: y, dx (``"x"``) or dw (``"w"``); as an operand ``"y"`` means dy."""


Pair: TypeAlias = tuple[Tensor | None, Tensor | None]
"""A gathered operand or a gradient of x, and one of w; None for none."""


class Lowering(Protocol):
    """A way to execute a matmul plan. Tensors are two-dimensional; the weight is ``[n, k]``."""

    def refuses(self, plan: MatmulPlan) -> str:
        """Return why the plan cannot be executed this way; empty if it can."""
        ...

    def prepare(self, plan: MatmulPlan, mesh: Mesh) -> None:
        """Make the process groups that it needs in addition to the plan's, if processes are running."""
        ...

    def forward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, keep: frozenset[str]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (``y [m, n]`` at rest, gathered x, gathered w) from ``x [m, k]`` and ``w [n, k]`` at rest.

        A gathered operand is returned if ``keep`` names it, for backward to reuse.
        """
        ...

    def backward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, dy: Tensor, *, wants: tuple[bool, bool], kept: Pair
    ) -> Pair:
        """Return (``dx``, ``dw``) at rest, each if wanted, from ``dy`` at rest."""
        ...

    def cost(self, plan: MatmulPlan, query: CostQuery) -> Cost:
        """Return every collective that forward and backward issue."""
        ...


def stored_dims(plan: MatmulPlan, operand: Operand) -> tuple[str, str]:
    """Return the dims of an operand in memory: x is ``[m, k]``, w is ``[n, k]``, y is ``[m, n]``."""
    return {"x": (plan.m, plan.k), "w": (plan.n, plan.k), "y": (plan.m, plan.n)}[operand]


def tensor_dim(plan: MatmulPlan, operand: Operand, dim: str) -> int:
    """Return the number of a named dim in an operand's tensor."""
    return stored_dims(plan, operand).index(dim)


def factors(out: Operand, tensors: Mapping[Operand, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (a, b) with ``out = a @ b``: ``y = x wᵀ``, ``dx = dy w``, ``dw = dyᵀ x``; w and dw are ``[n, k]``."""
    if out == "y":
        return tensors["x"], tensors["w"].t()
    if out == "x":
        return tensors["y"], tensors["w"]
    return tensors["y"].t(), tensors["x"]


def split_axes(plan: MatmulPlan, mesh: Mesh, operand: Operand) -> tuple[str, ...]:
    """Return the axes of an operand's extras that are larger than 1, major first."""
    return tuple(axis for _, axis in plan.extras(operand) if mesh.size(axis) > 1)


def split_dims(plan: MatmulPlan, mesh: Mesh, operand: Operand) -> set[str]:
    """Return the dims along which an operand is really gathered or scattered."""
    return {dim for dim, axis in plan.extras(operand) if mesh.size(axis) > 1}


def brick_sizes(plan: MatmulPlan, mesh: Mesh, x: Sequence[int], n: int) -> dict[str, int]:
    """Return the elements of m, k and n that this rank multiplies, from the shape of ``x [m, k]`` and the n of w at rest."""

    def times(operand: Operand, dim: str) -> int:
        return mesh.size(*(axis for d, axis in plan.extras(operand) if d == dim))

    return {
        plan.m: x[0] * times("x", plan.m),
        plan.k: x[1] * times("x", plan.k),
        plan.n: n * times("w", plan.n),
    }


class Sum:
    """A sum of matrix products. Half precision is summed in float32, so that pieces are not rounded more than one product."""

    def __init__(self, dtype: torch.dtype) -> None:
        """``dtype``: of the terms and of the result."""
        self._dtype = dtype
        self._wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        self._total: Tensor | None = None

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b``."""
        half = self._wide != self._dtype
        if half and not on_gpu(a):  # only CUDA multiplies half precision into float32
            a, b, half = a.to(self._wide), b.to(self._wide), False
        if self._total is None:
            self._total = torch.mm(a, b, out_dtype=self._wide) if half else a @ b
        elif not half:
            self._total.addmm_(a, b)
        elif torch.compiler.is_compiling():  # which supports out_dtype only for mm
            self._total = self._total + torch.mm(a, b, out_dtype=self._wide)
        else:
            self._total = torch.addmm(self._total, a, b, out_dtype=self._wide)

    def done(self) -> Tensor:
        """Return the sum, in the dtype of its terms; there is at least one."""
        if self._total is None:
            raise ValueError("a sum of no products")
        return self._total.to(self._dtype)
