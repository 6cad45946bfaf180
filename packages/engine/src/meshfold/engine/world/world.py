"""The checked spec, the mesh over the running processes, and this rank's device."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch

from meshfold.engine.nodes import warn_of_crossing
from meshfold.mesh import Group, Mesh, ParallelSpec, SpecError
from meshfold.mesh.processes import DEFAULT_TIMEOUT, Environment, Process, running_world, start
from meshfold.mesh.watchdog import watchdog_limit

PIPE = "pipe"
"""The axis of a pipeline's stages"""


@dataclass(frozen=True, kw_only=True)
class World:
    """Spec, mesh and device of an engine.

    Attributes:
        spec: checked against the number of processes.
        mesh: has the spec's axes, and those of mode 1d with size 1 where there is no tensor parallelism.
        device: where this rank's tensors are.
        mode: the tensor-parallel mode; None without a tensor entry.
        outer_axes: those that the batch is split over, by rows or by tokens: all but the tensor axes and the pipeline's.
            Gradients are summed over them, and ``zero`` shares out what its ranks would all hold.
        row_axes: those of them that its rows are split over; ranks along the others have the same rows and different tokens.
    """

    spec: ParallelSpec
    mesh: Mesh
    device: torch.device
    mode: object
    outer_axes: tuple[str, ...]
    row_axes: tuple[str, ...]

    @property
    def everyone(self) -> Group:
        """All ranks."""
        return self.mesh.group(*self.mesh.names)

    @property
    def stage_group(self) -> Group:
        """Ranks that hold the same layers: all of them without a pipeline."""
        return self.mesh.group(*(axis for axis in self.mesh.names if axis != PIPE))

    @property
    def data_group(self) -> Group:
        """Ranks that hold the same blocks and different parts of the batch."""
        return self.mesh.group(*self.outer_axes)

    @property
    def data_index(self) -> int:
        """This rank's data coordinate."""
        return self.mesh.index(*self.outer_axes)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this data coordinate: together they hold every tensor."""
        inner = [axis for axis in self.mesh.names if axis not in self.outer_axes]
        return next(tuple(ranks) for ranks in self.mesh.groups(*inner) if self.mesh.rank in ranks)

    @property
    def pipelined(self) -> bool:
        """Tell whether ranks of the axis ``pipe`` hold different layers."""
        return self.mesh.size(PIPE) > 1

    @property
    def pipe_group(self) -> Group:
        """Ranks that together hold all layers, and have the same rows of the batch and the same blocks' places."""
        return self.mesh.group(PIPE)

    @property
    def data_size(self) -> int:
        """Number of data coordinates."""
        return self.mesh.size(*self.outer_axes)

    @property
    def row_group(self) -> Group:
        """Ranks that have different rows of the batch, and the same tokens of each."""
        return self.mesh.group(*self.row_axes)

    @property
    def row_index(self) -> int:
        """Number of the data coordinate whose rows of the batch this rank has."""
        return self.mesh.index(*self.row_axes)

    @property
    def row_size(self) -> int:
        """Into how many parts the rows of the batch are split."""
        return self.mesh.size(*self.row_axes)


def join_world(
    parallel: Mapping[str, object] | ParallelSpec,
    device: torch.device | str | None,
    environment: Environment | None = None,
    *,
    limit_s: float | None = None,
) -> World:
    """Check the spec against the processes that run, start this one's part, and lay the mesh over them.

    A single process needs no process group and gets none.

    Args:
        parallel: the spec.
        device: of this rank's tensors; None for the usual one.
        environment: which rank to be, where variables do not say it.
        limit_s: seconds that the other processes are waited for; None for the watchdog's usual ones, 0 for half an hour.

    Raises:
        SpecError: for a spec that is wrong, does not fit the processes, or needs what is not installed.
        LaunchError: when the other processes cannot be met.
    """
    alive = running_world()
    if alive is not None:
        size = alive.size
    else:
        environment = environment or Environment.detect()
        size = environment.world_size
    if isinstance(parallel, ParallelSpec):
        spec = parallel.with_world_size(size)
    else:
        spec = ParallelSpec.parse(parallel, size)
    require_runnable(spec)
    place = _device(device)
    if alive is None and size > 1:
        limit = timedelta(seconds=watchdog_limit(limit_s)) or DEFAULT_TIMEOUT
        process = start(environment, device=place, meeting=limit)
        atexit.register(_leave, process)
        place = process.device
    elif alive is not None:
        place = start(environment, device=place).device
    elif place is None:
        place = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    tensor_axes = () if spec.tensor is None else spec.tensor.axis_names
    outer = tuple(axis for axis in spec.axes if axis not in tensor_axes and axis != PIPE)
    sequence_axes = () if spec.sequence is None else tuple(spec.sequence.axes)
    mesh = Mesh(spec.axes if tensor_axes else {**spec.axes, "tensor": 1})
    warn_of_crossing(mesh, tensor_axes, environment or Environment.detect())
    return World(
        spec=spec,
        mesh=mesh,
        device=place,
        mode=_mode(spec),
        outer_axes=outer,
        row_axes=tuple(axis for axis in outer if axis not in sequence_axes),
    )


def _mode(spec: ParallelSpec) -> object:
    if spec.tensor is None:
        return None
    if spec.sequence is not None and spec.sequence.mode == "megatron":
        return "1d+sequence"
    return spec.tensor.mode


def _device(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SpecError(
            f"device={device!r}: {error}. Write 'cpu', 'cuda' or 'cuda:0', or leave it out"
        ) from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise SpecError(f"device={device!r}: torch sees {found or 'no'} GPUs. Write 'cpu', or leave it out")
    return place


def _leave(process: Process) -> None:
    """At exit; a rank that failed does not wait for the others."""
    process.close(wait=not hasattr(sys, "last_value"))


def has_zero(parallel: Mapping[str, object] | ParallelSpec) -> bool:
    """Return whether a spec, parsed or not, has the entry ``zero``."""
    if isinstance(parallel, ParallelSpec):
        return parallel.zero is not None
    return isinstance(parallel, Mapping) and parallel.get("zero") is not None


def require_runnable(spec: ParallelSpec) -> None:
    """Check that the engine can run a spec.

    Raises:
        SpecError: that names the distribution which is not installed.
    """
    spec.require_installed()
