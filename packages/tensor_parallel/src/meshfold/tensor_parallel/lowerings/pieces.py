"""What stream and ring share: the three products, pieces of them, and sums of pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshfold.mesh import Group, Mesh

if TYPE_CHECKING:
    from meshfold.tensor_parallel.algebra import MatmulPlan, Operand

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


def brick(plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor) -> dict[str, int]:
    """Elements of m, k and n that this rank multiplies, from ``x [m, k]`` and ``w [n, k]`` at rest."""

    def times(operand: Operand, dim: str) -> int:
        return mesh.size(*(axis for d, axis in plan.extras(operand) if d == dim))

    return {
        plan.m: x.shape[0] * times("x", plan.m),
        plan.k: x.shape[1] * times("x", plan.k),
        plan.n: w.shape[0] * times("w", plan.n),
    }


def block_numbers(mesh: Mesh, axes: tuple[str, ...], group: Group) -> tuple[int, ...]:
    """Which block each rank of a group holds, in the group's order, of what is split over ``axes``, major first.

    The order of a group is that of the mesh, the order of a layout is its own.
    """
    if len(axes) == 1:
        return tuple(range(group.size))
    return tuple(mesh.index(*axes, rank=rank) for rank in group.ranks)


class Sum:
    """A sum of matrix products. Half precision is summed in float32, so that pieces round no more than one product."""

    def __init__(self, like: Tensor, rows: int, columns: int) -> None:
        self._dtype = like.dtype
        self._wide = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
        self._total = like.new_empty((rows, columns), dtype=self._wide)
        self._empty = True

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b``."""
        beta = 0 if self._empty else 1
        self._empty = False
        if self._wide == self._dtype:
            self._total.addmm_(a, b, beta=beta)
        elif a.is_cuda:
            self._total = torch.addmm(self._total, a, b, beta=beta, out_dtype=self._wide)
        else:
            self._total.addmm_(a.to(self._wide), b.to(self._wide), beta=beta)

    def done(self) -> Tensor:
        """The sum, in the dtype of its terms."""
        return self._total.to(self._dtype)
