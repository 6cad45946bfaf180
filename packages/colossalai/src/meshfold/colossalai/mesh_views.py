"""Views of the mesh for scripts: ``plugin.pg_mesh``, ``plugin.tp_group`` as torch's process groups, ``plugin.stage_manager``."""

from __future__ import annotations

from typing import Any

from meshfold.colossalai.context import SEQUENCE_AXES, TENSOR_AXES
from meshfold.engine.world import PIPE
from meshfold.mesh import Mesh, SpecError, is_started
from meshfold.mesh.processes import create_group

AXES = {"dp": ("data",), "pp": (PIPE,), "tp": TENSOR_AXES, "sp": SEQUENCE_AXES}
"""Axes that each short name spans."""
_NAMES = tuple(AXES)


def axes_of(mesh: Mesh, name: str) -> tuple[str, ...]:
    """Return the axes of the mesh that a short name spans."""
    return tuple(axis for axis in AXES[name] if axis in mesh.axes)


def ranks_of(mesh: Mesh, *names: str) -> tuple[int, ...]:
    """Return the ranks of this process's group."""
    axes = [axis for name in names for axis in axes_of(mesh, name)]
    return next(tuple(ranks) for ranks in mesh.groups(*axes) if mesh.rank in ranks)


def group_of(mesh: Mesh, *names: str) -> Any:
    """Return torch's process group over the named axes; None if no processes were started. Only its ranks need to call."""
    return create_group(ranks_of(mesh, *names)) if is_started() else None


class ProcessGroupMesh:
    """A mesh as ``plugin.pg_mesh`` showed it: its axes are data, pipeline, tensor and sequence, in this order."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.rank = mesh.rank
        self.shape = tuple(mesh.size(*axes_of(mesh, name)) for name in _NAMES)

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Return the number of ranks along an axis; None: along all."""
        return self.shape if dim is None else self.shape[dim]

    def coordinate(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Return this process's index along an axis; None: along all."""
        places = tuple(self._mesh.index(*axes_of(self._mesh, name)) for name in _NAMES)
        return places if dim is None else places[dim]

    def get_group_along_axis(self, axis: int | list[int]) -> Any:
        """Return torch's process group along an axis, or several."""
        return group_of(self._mesh, *(_NAMES[one] for one in ([axis] if isinstance(axis, int) else axis)))

    def get_ranks_in_group(self, group: Any) -> list[int]:
        """Return the global ranks of a group of this mesh.

        Raises:
            SpecError: for another group.
        """
        for name in _NAMES:
            if group is not None and group is group_of(self._mesh, name):
                return list(ranks_of(self._mesh, name))
        raise SpecError("get_ranks_in_group(group): give plugin.tp_group, dp_group, pp_group or sp_group")


class StageManager:
    """A rank's stage of the pipeline: ``plugin.stage_manager.is_last_stage()``. Every rank has the loss of a pipeline here.

    Attributes:
        stage: this rank's index in its pipeline.
        num_stages: ranks of a pipeline; 1 without one.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.stage, self.num_stages = mesh.index(PIPE), mesh.size(PIPE)

    def is_first_stage(self, ignore_chunk: bool = True) -> bool:
        """Tell whether this rank is the first of its pipeline."""
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = True) -> bool:
        """Tell whether this rank is the last of its pipeline."""
        return self.stage == self.num_stages - 1

    is_first_device, is_last_device = is_first_stage, is_last_stage
