"""Check of a linear layer's sizes: each split dim is a multiple of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshfold.mesh import LayoutError, Mesh
from meshfold.tensor_parallel.modes import split_evenly

if TYPE_CHECKING:
    from meshfold.tensor_parallel.layers.linear import Linear


def check_sizes(layer: Linear, mesh: Mesh) -> None:
    """Refuse sizes that cannot be split, by a LayoutError; a head's vocabulary is padded instead."""
    matmul_plan = layer.plan
    for axes in (matmul_plan.x[matmul_plan.k], matmul_plan.w[matmul_plan.k]):
        split_evenly(layer.in_features, axes, mesh, f"in_features={layer.in_features} of a {layer.role} layer")
    if layer.role not in ("head", "tied_head") and not layer.parts:
        for axes in (matmul_plan.y[matmul_plan.n], matmul_plan.w[matmul_plan.n]):
            split_evenly(layer.out_features, axes, mesh, f"out_features={layer.out_features} of a {layer.role} layer")
    gathered = [axis for dim, axis in matmul_plan.extras("w") if dim == matmul_plan.n]
    if mesh.size(*gathered) > 1 and (len(layer.parts) > 1 or any(part.repeat > 1 for part in layer.parts)):
        raise LayoutError(
            f"fused parts {tuple(part.size for part in layer.parts)} cannot be split over {', '.join(gathered)}, which "
            f"layout w={str(matmul_plan.w)!r} puts on {matmul_plan.n} and the matmul gathers again: let it split "
            f"{matmul_plan.k} in the mode's {layer.role} layout"
        )
    for part in layer.parts:
        split_evenly(
            part.size * part.repeat,
            matmul_plan.y[matmul_plan.n],
            mesh,
            f"a part of {part.size} of a {layer.role} layer",
        )
    for part in layer.input_parts:
        what = f"a part of {part.size} of what a {layer.role} layer reads"
        split_evenly(part.size, matmul_plan.x[matmul_plan.k], mesh, what)
