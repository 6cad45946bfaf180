"""The sharded matmul in fp8: the gather lowering, whose operands are rounded once they are gathered.

A scale belongs to a row or a tensor of the whole operand; a rank has a block of it. The amax is reduced over the axes that split
the dims it was taken over, including the axes of the batch. The rounded operands then equal the serial model's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from meshfold.kernels import (
    Fp8Dim,
    Fp8Maximum,
    Fp8Recipe,
    Fp8Source,
    Fp8Tensor,
    Fp8Weight,
    fp8_forward,
    fp8_gradient_casts,
    fp8_input_gradient,
    fp8_weight_gradient,
    shared_columns,
)
from meshfold.mesh import Mesh, Pending, collectives
from meshfold.tensor_parallel.fp8_cast_products import Fp8CastProducts, bind_fp8_cast_products
from meshfold.tensor_parallel.lowerings.common import Pair
from meshfold.tensor_parallel.lowerings.gather import Gather, start_gather, start_leave
from meshfold.tensor_parallel.plan import MatmulPlan


def bind_fp8_maximum(mesh: Mesh, plan: MatmulPlan | None, outer_axes: tuple[str, ...]) -> Fp8Maximum:
    """Bind the reduction of an amax that was taken over the dims m, k or n of a gathered operand.

    Args:
        mesh: where the operand lies.
        plan: of the matmul; None if tensor parallelism splits nothing.
        outer_axes: further axes that split the tokens: of data and of sequences.
    """
    groups: dict[Fp8Dim, list[tuple[str, ...]]] = {"m": [], "k": [], "n": []}
    if plan is not None:
        names: dict[Fp8Dim, str] = {"m": plan.m, "k": plan.k, "n": plan.n}
        for dim, name in names.items():
            groups[dim] = [(axis,) for axis in plan.compute[name]]
    for axes in dict.fromkeys(
        [*(each for found in groups.values() for each in found), outer_axes]
    ):  # in the same order on every rank
        mesh.prepare(*axes)

    class Maximum:
        """:data:`meshfold.kernels.Fp8Maximum` over the ranks of the plan and of the outer axes."""

        def __call__(self, amax: Tensor, dims: tuple[Fp8Dim, ...]) -> Tensor:
            for dim in dims:
                for axes in groups[dim]:
                    amax = collectives.all_reduce(amax, mesh.group(*axes), "max")
                if dim == "m" and not _alone:
                    amax = collectives.all_reduce(amax, mesh.group(*outer_axes), "max")
            return amax

        def reduces(self, dims: tuple[Fp8Dim, ...]) -> bool:
            """Return True if several ranks hold parts of these dims."""
            split = {axis for dim in dims for axes in groups[dim] for axis in axes}
            return mesh.size(*split, *(outer_axes if "m" in dims else ())) > 1

    return Maximum()


_alone: list[None] = []


@contextmanager
def without_outer_ranks() -> Iterator[None]:
    """Context manager around a forward only for shapes. Ranks with other tokens need not call it: they contribute no amax."""
    _alone.append(None)
    try:
        yield
    finally:
        _alone.pop()


class Fp8Gather(Gather):
    """The gather lowering with operands in fp8. One object for each plan, mesh, recipe and outer axes: it is a key.

    Its collectives are those of the gather lowering: operands travel in their own dtype, and an amax is a few bytes. Its groups are
    made when the maximum is bound.
    """

    def __init__(self, recipe: Fp8Recipe, maximum: Fp8Maximum) -> None:
        """Args:
        recipe: scales and formats of the three products.
        maximum: maps the amax of a gathered operand to the whole operand's.
        """
        self._recipe, self._maximum = recipe, maximum

    def forward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, keep: frozenset[str]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        coming_x, coming_w = start_gather(plan, mesh, "x", x), start_gather(plan, mesh, "w", w)
        return self._forward(plan, mesh, coming_x, coming_w.wait(), w)[0], None, None

    def backward(
        self, plan: MatmulPlan, mesh: Mesh, x: Tensor, w: Tensor, dy: Tensor, *, wants: tuple[bool, bool], kept: Pair
    ) -> Pair:
        coming_dy = start_gather(plan, mesh, "y", dy)
        coming_w = start_gather(plan, mesh, "w", w) if wants[0] else None
        return self._backward(plan, mesh, x, None if coming_w is None else coming_w.wait, coming_dy, wants)

    def _forward(
        self, plan: MatmulPlan, mesh: Mesh, coming_x: Pending, w: Tensor | Fp8Tensor, weight: Tensor
    ) -> tuple[Tensor, Fp8Source | None]:
        partial, source = fp8_forward(coming_x.wait(), w, self._recipe, self._maximum, weight=weight)
        return start_leave(plan, mesh, "y", partial).wait(), source

    def _backward(
        self,
        plan: MatmulPlan,
        mesh: Mesh,
        x: Tensor,
        w: Callable[[], Tensor | Fp8Tensor] | None,
        coming_dy: Pending,
        wants: tuple[bool, bool],
        source: Fp8Source | None = None,
    ) -> Pair:
        recipe, maximum = self._recipe, self._maximum
        coming_x = start_gather(plan, mesh, "x", x) if wants[1] else None
        casts = fp8_gradient_casts(coming_dy.wait(), recipe, maximum, wants=wants)
        leaving_dx = leaving_dw = None
        if w is not None:
            leaving_dx = start_leave(plan, mesh, "x", fp8_input_gradient(casts, w(), recipe, maximum))
        if coming_x is not None:
            shared = shared_columns(coming_x.wait(), recipe, maximum, source)
            leaving_dw = start_leave(plan, mesh, "w", fp8_weight_gradient(casts, shared, recipe, maximum))
        dx = None if leaving_dx is None else leaving_dx.wait()
        return dx, None if leaving_dw is None else leaving_dw.wait()

    def weight(self, plan: MatmulPlan, mesh: Mesh) -> Fp8Weight | None:
        """Return what casts a weight once for many products; None where each product gathers it from other ranks first."""
        gathers = mesh.size(*(axis for _, axis in plan.steps("w"))) > 1
        return None if gathers else Fp8Weight(self._recipe, self._maximum)

    def cast_products(self, plan: MatmulPlan, mesh: Mesh) -> Fp8CastProducts:
        """Return the products with a weight that :meth:`weight` has cast."""
        plan.prepare(mesh)

        def forward(x: Tensor, w: Fp8Tensor, weight: Tensor) -> tuple[Tensor, Fp8Source | None]:
            return self._forward(plan, mesh, start_gather(plan, mesh, "x", x), w, weight)

        def backward(x: Tensor, w: Fp8Tensor, dy: Tensor, wants: tuple[bool, bool], source: Fp8Source | None) -> Pair:
            coming_dy = start_gather(plan, mesh, "y", dy)
            return self._backward(plan, mesh, x, (lambda: w) if wants[0] else None, coming_dy, wants, source)

        return mesh.once(
            ("fp8 cast products", plan, self), lambda: bind_fp8_cast_products(self._recipe, forward, backward)
        )


def bind_fp8_lowering(plan: MatmulPlan, mesh: Mesh, recipe: Fp8Recipe, outer_axes: tuple[str, ...]) -> Fp8Gather:
    """Bind the lowering of ``y = x wᵀ`` on local blocks with operands in fp8; ``outer_axes``: as of :func:`bind_fp8_maximum`."""
    return mesh.once(
        ("fp8 lowering", plan, recipe, outer_axes),
        lambda: Fp8Gather(recipe, bind_fp8_maximum(mesh, plan, outer_axes)),
    )
