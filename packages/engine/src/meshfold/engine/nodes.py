"""Axes of a mesh that leave their node: tensor axes should not, since they communicate in every layer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from meshfold.mesh import Mesh
from meshfold.mesh.processes import Environment
from meshfold.mesh.spec import join_choices


def crossing(mesh: Mesh, axes: Sequence[str], ranks_per_node: int) -> list[str]:
    """Those of the axes along which some group has ranks of several nodes, if nodes have so many consecutive ranks."""
    return [
        axis
        for axis in axes
        if any(len({rank // ranks_per_node for rank in ranks}) > 1 for ranks in mesh.groups(axis))
    ]


def warn_of_crossing(mesh: Mesh, axes: Sequence[str], here: Environment) -> None:
    """Say it on rank 0, where the ranks of the mesh are those that a launcher started on several nodes."""
    several = 1 < here.world_size == mesh.world_size and here.local_world_size < here.world_size
    if not several or here.rank != 0:
        return
    outside = crossing(mesh, axes, here.local_world_size)
    if outside:
        sys.stderr.write(
            f"warning: a node has {here.local_world_size} ranks, and the tensor axes {join_choices(outside, last='and')} go from "
            "node to node: they communicate in every layer, at the speed of the network. Make their product divide "
            f"{here.local_world_size}, and let data or pipeline span the nodes\n"
        )
