"""Views of one mesh for scripts: ``gpc``, ``ParallelMode``, ``ProcessGroupMesh`` and process groups. Only scripts use them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from meshfold.colossalai.arguments import Translation
from meshfold.colossalai.settings import Config, settings_of
from meshfold.colossalai.submodules import find
from meshfold.engine.world import PIPE, join_world
from meshfold.mesh import Group, Mesh, SpecError, is_started
from meshfold.mesh.processes import create_group


class ParallelMode(Enum):
    """Colossal-AI's names of groups. A row's group has the ranks of that row, which differ along our axis ``col``."""

    GLOBAL = "global"
    DATA = "data"
    MODEL = "model"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
    PARALLEL_1D = "1d"
    PARALLEL_2D_ROW = "2d_row"
    PARALLEL_2D_COL = "2d_col"
    PARALLEL_2P5D_ROW = "2p5d_row"
    PARALLEL_2P5D_COL = "2p5d_col"
    PARALLEL_2P5D_DEP = "2p5d_dep"
    PARALLEL_2P5D_XZ = "2p5d_xz"
    PARALLEL_3D_INPUT = "3d_input"
    PARALLEL_3D_WEIGHT = "3d_weight"
    PARALLEL_3D_OUTPUT = "3d_output"


TENSOR_AXES = ("tensor", "depth", "row", "col", "a", "b", "c")
SEQUENCE_AXES = ("seq", "ring", "ulysses")

AXES: Mapping[ParallelMode, tuple[str, ...]] = {
    ParallelMode.GLOBAL: ("data", "pipe", *SEQUENCE_AXES, *TENSOR_AXES),
    ParallelMode.DATA: ("data",),
    ParallelMode.MODEL: ("pipe", *TENSOR_AXES),
    ParallelMode.PIPELINE: ("pipe",),
    ParallelMode.TENSOR: TENSOR_AXES,
    ParallelMode.SEQUENCE: SEQUENCE_AXES,
    ParallelMode.PARALLEL_1D: ("tensor",),
    ParallelMode.PARALLEL_2D_ROW: ("col",),
    ParallelMode.PARALLEL_2D_COL: ("row",),
    ParallelMode.PARALLEL_2P5D_ROW: ("col",),
    ParallelMode.PARALLEL_2P5D_COL: ("row",),
    ParallelMode.PARALLEL_2P5D_DEP: ("depth",),
    ParallelMode.PARALLEL_2P5D_XZ: ("depth", "row"),
    ParallelMode.PARALLEL_3D_INPUT: ("b",),
    ParallelMode.PARALLEL_3D_WEIGHT: ("c",),
    ParallelMode.PARALLEL_3D_OUTPUT: ("a",),
}
"""The axes along which the ranks of a group differ."""


class ParallelContext:
    """The interface of ``gpc`` for the mesh of the last ``launch``, ``initialize`` or ``boost`` of this process.

    Attributes:
        config: as read there; empty before.
    """

    def __init__(self) -> None:
        self.config = Config()
        self._mesh: Mesh | None = None

    def show(self, config: Config, mesh: Mesh) -> None:
        """Use this config and mesh from now on."""
        self.config, self._mesh = config, mesh

    @property
    def mesh(self) -> Mesh:
        """The current mesh.

        Raises:
            SpecError: before any ``launch``.
        """
        if self._mesh is None:
            raise SpecError("gpc has no mesh yet: call launch_from_torch(config) or initialize(..., config=...) first")
        return self._mesh

    def get_global_rank(self) -> int:
        """Return this process's global rank."""
        return self.mesh.rank

    def get_local_rank(self, mode: ParallelMode) -> int:
        """Return this process's rank in its group."""
        return self.mesh.index(*self._axes(mode))

    def get_world_size(self, mode: ParallelMode) -> int:
        """Return the size of this rank's group."""
        return self.mesh.size(*self._axes(mode))

    def get_ranks_in_group(self, mode: ParallelMode) -> list[int]:
        """Return the global ranks of its group."""
        rank = self.mesh.rank
        return next(ranks for ranks in self.mesh.groups(*self._axes(mode)) if rank in ranks)

    def get_group(self, mode: ParallelMode) -> Group:
        """Return its group, for the collectives of ``meshfold.mesh``. All ranks must get their groups in the same order."""
        return self.mesh.group(*self._axes(mode))

    def is_initialized(self, mode: ParallelMode) -> bool:
        """Return True if the mesh has an axis of this name."""
        return self._mesh is not None and bool(self._axes(mode))

    def is_first_rank(self, mode: ParallelMode) -> bool:
        """Return True if this rank is the first of its group."""
        return self.get_local_rank(mode) == 0

    def is_last_rank(self, mode: ParallelMode) -> bool:
        """Return True if this rank is the last of its group."""
        return self.get_local_rank(mode) == self.get_world_size(mode) - 1

    def is_pipeline_first_stage(self) -> bool:
        """Return True if this rank is the first of its pipeline."""
        return self.is_first_rank(ParallelMode.PIPELINE)

    def is_pipeline_last_stage(self) -> bool:
        """Return True if this rank is the last of its pipeline."""
        return self.is_last_rank(ParallelMode.PIPELINE)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks with different rows."""
        return self.get_world_size(ParallelMode.DATA)

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of ranks of a pipeline."""
        return self.get_world_size(ParallelMode.PIPELINE)

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that share a matrix."""
        return self.get_world_size(ParallelMode.TENSOR)

    def destroy(self) -> None:
        """Forget mesh and config; the process group ends with the process."""
        self.config, self._mesh = Config(), None

    def _axes(self, mode: ParallelMode) -> tuple[str, ...]:
        if not isinstance(mode, ParallelMode):
            raise SpecError(f"mode={mode!r}: one of {', '.join(f'ParallelMode.{one.name}' for one in ParallelMode)}")
        return tuple(axis for axis in AXES[mode] if axis in self.mesh.axes)


gpc = global_context = ParallelContext()
"""The context that scripts ask. Code of your own asks ``engine.mesh``."""

_NOTHING = dict.fromkeys(
    ("rank", "world_size", "host", "port", "local_rank"),
    "the ranks are those of meshfold run, torchrun or Slurm",
)


def launch(config: object = None, *, seed: int | None = None, backend: str | None = None, **given: Any) -> Config:
    """Connect to the other processes and read the config, for ``gpc`` and :func:`meshfold.engine.initialize`.

    An engine does this itself: a script needs it only if it uses ``gpc`` earlier.

    Args:
        config: a dict, or the path of a Python file; None for none.
        seed: of initial weights, dropout and order, unless the config has one.
        backend: does nothing; it is NCCL with a GPU for each rank, else gloo.
        given: ``rank``, ``world_size``, ``host``, ``port``, ``local_rank`` and ``verbose`` do nothing.

    Raises:
        SpecError: for an invalid config.
        LaunchError: if the other processes cannot be reached.
    """
    unknown = [name for name in given if name not in (*_NOTHING, "verbose")]
    if unknown:
        raise SpecError(
            f"launch: there is no {unknown[0]!r}. Known: config, seed, backend, {', '.join(_NOTHING)}, verbose"
        )
    read = Config.of(config)
    if seed is not None:
        read.setdefault("seed", seed)
    settings = settings_of(read)
    mesh = join_world(settings.parallel, settings.engine.get("device")).mesh
    words = [f"{name}={value!r} does nothing: {_NOTHING[name]}" for name, value in given.items() if name in _NOTHING]
    Translation(words=words).say("launch", rank=mesh.rank)
    gpc.show(read, mesh)
    return read


launch_from_torch = launch_from_slurm = launch_from_openmpi = launch


AXES_OF_SHORT_NAMES = {"dp": ("data",), "pp": (PIPE,), "tp": TENSOR_AXES, "sp": SEQUENCE_AXES}
"""Short name: the mesh axes that it spans."""
_SHORT_NAMES = tuple(AXES_OF_SHORT_NAMES)


def axes_of(mesh: Mesh, name: str) -> tuple[str, ...]:
    """Return the axes of the mesh that a short name spans."""
    return tuple(axis for axis in AXES_OF_SHORT_NAMES[name] if axis in mesh.axes)


def ranks_of(mesh: Mesh, *names: str) -> tuple[int, ...]:
    """Return the ranks of this process's group."""
    axes = [axis for name in names for axis in axes_of(mesh, name)]
    return next(tuple(ranks) for ranks in mesh.groups(*axes) if mesh.rank in ranks)


def group_of(mesh: Mesh, *names: str) -> Any:
    """Return torch's process group over the named axes; None if no processes were started. Only its ranks need to call."""
    return create_group(ranks_of(mesh, *names)) if is_started() else None


class ProcessGroupMesh:
    """A mesh like ``plugin.pg_mesh``, with the axes data, pipeline, tensor and sequence, in this order."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.rank = mesh.rank
        self.shape = tuple(mesh.size(*axes_of(mesh, name)) for name in _SHORT_NAMES)

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Return the number of ranks along an axis; None: along all."""
        return self.shape if dim is None else self.shape[dim]

    def coordinate(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Return this process's index along an axis; None: along all."""
        places = tuple(self._mesh.index(*axes_of(self._mesh, name)) for name in _SHORT_NAMES)
        return places if dim is None else places[dim]

    def get_group_along_axis(self, axis: int | list[int]) -> Any:
        """Return torch's process group along an axis, or several."""
        return group_of(self._mesh, *(_SHORT_NAMES[one] for one in ([axis] if isinstance(axis, int) else axis)))

    def get_ranks_in_group(self, group: Any) -> list[int]:
        """Return the global ranks of a group of this mesh.

        Raises:
            SpecError: for another group.
        """
        for name in _SHORT_NAMES:
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
        """Return True if this rank is the first of its pipeline."""
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = True) -> bool:
        """Return True if this rank is the last of its pipeline."""
        return self.stage == self.num_stages - 1

    is_first_device, is_last_device = is_first_stage, is_last_stage


__path__: list[str] = []  # Colossal-AI's module of this name has submodules


def __getattr__(name: str) -> Any:
    """Return other names of this module in Colossal-AI."""
    from meshfold import colossalai as compat

    return find(name, __name__, compat._HOMES)
