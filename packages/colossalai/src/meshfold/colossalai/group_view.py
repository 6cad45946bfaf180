"""``plugin.pg_mesh``, ``plugin.tp_group`` and their like: process groups of torch, for scripts that communicate by themselves."""

from __future__ import annotations

from typing import Any

from meshfold.colossalai.context import SEQUENCE_AXES, TENSOR_AXES
from meshfold.engine.world import PIPE
from meshfold.mesh import Mesh, SpecError, is_started
from meshfold.mesh.processes import create_group

AXES = {"dp": ("data",), "pp": (PIPE,), "tp": TENSOR_AXES, "sp": SEQUENCE_AXES}
"""What their short names span."""
_NAMES = tuple(AXES)


def axes_of(mesh: Mesh, name: str) -> tuple[str, ...]:
    """The axes of the mesh that a short name spans."""
    return tuple(axis for axis in AXES[name] if axis in mesh.axes)


def ranks_of(mesh: Mesh, *names: str) -> tuple[int, ...]:
    """The ranks of this process's group."""
    axes = [axis for name in names for axis in axes_of(mesh, name)]
    return next(tuple(ranks) for ranks in mesh.groups(*axes) if mesh.rank in ranks)


def group_of(mesh: Mesh, *names: str) -> Any:
    """A process group of torch over them; None where no processes were started. Its ranks call, the others need not."""
    return create_group(ranks_of(mesh, *names)) if is_started() else None


class ProcessGroupMesh:
    """Answers of one mesh, as ``plugin.pg_mesh`` gave them: its axes are data, pipeline, tensor and sequence, in this order."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.rank = mesh.rank
        self.shape = tuple(mesh.size(*axes_of(mesh, name)) for name in _NAMES)

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Ranks along an axis; None: along all."""
        return self.shape if dim is None else self.shape[dim]

    def coordinate(self, dim: int | None = None) -> int | tuple[int, ...]:
        """This process's place along an axis; None: along all."""
        places = tuple(self._mesh.index(*axes_of(self._mesh, name)) for name in _NAMES)
        return places if dim is None else places[dim]

    def get_group_along_axis(self, axis: int | list[int]) -> Any:
        """A process group of torch along an axis, or several."""
        return group_of(self._mesh, *(_NAMES[one] for one in ([axis] if isinstance(axis, int) else axis)))

    def get_ranks_in_group(self, group: Any) -> list[int]:
        """The global ranks of a group of this mesh.

        Raises:
            SpecError: for another group.
        """
        for name in _NAMES:
            if group is not None and group is group_of(self._mesh, name):
                return list(ranks_of(self._mesh, name))
        raise SpecError("get_ranks_in_group(group): give plugin.tp_group, dp_group, pp_group or sp_group")
