"""Ranks of an engine: the checked spec, the mesh over the running processes and this rank's device. Also the errors that all
ranks raise, and the watchdog over their collectives."""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from meshfold.checkpoint import CheckpointError
from meshfold.mesh import Group, Mesh, ParallelSpec, SpecError, all_reduce, broadcast
from meshfold.mesh.processes import (
    DEFAULT_TIMEOUT,
    Environment,
    Process,
    running_world,
    start,
    watchdog_settings,
)
from meshfold.mesh.spec import join_choices
from meshfold.mesh.watchdog import Watch, watch, watchdog_limit

__all__ = ["PIPE", "World", "crossing", "fail_together", "join_world"]

PIPE = "pipe"
"""The axis of a pipeline's stages"""


@dataclass(frozen=True, kw_only=True)
class World:
    """Spec, mesh and device of an engine.

    Attributes:
        spec: checked against the number of processes.
        mesh: has the spec's axes; without tensor parallelism, also the axes of mode 1d with size 1.
        device: where this rank's tensors are.
        mode: the tensor-parallel mode; None without a tensor entry.
        outer_axes: those that the batch is split over, by rows or by tokens: all but the pipeline's and those of tensor and axial.
            Gradients are summed over them, and ``zero`` shards over them.
        row_axes: the axes that its rows are split over; ranks along the others have the same rows and different tokens.
    """

    spec: ParallelSpec
    mesh: Mesh
    device: torch.device
    mode: object
    outer_axes: tuple[str, ...]
    row_axes: tuple[str, ...]

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes whose ranks can work on different tokens: all but the pipeline's."""
        return tuple(axis for axis in self.mesh.names if axis != PIPE)

    @property
    def expert_group(self) -> Group:
        """Ranks that together have all experts of a layer, each different ones; this rank alone without ``expert``."""
        return self.mesh.group(*self.spec.expert_axes, *self.spec.expert_tensor_axes)

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
        return self.mesh.ranks_along(*inner)

    @property
    def pipelined(self) -> bool:
        """True if ranks of the axis ``pipe`` hold different layers."""
        return self.mesh.size(PIPE) > 1

    @property
    def pipe_group(self) -> Group:
        """Ranks that together hold all layers, with the same rows of the batch and the same block coordinates."""
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
        """Number of parts that the rows of the batch are split into."""
        return self.mesh.size(*self.row_axes)


def join_world(
    parallel: Mapping[str, object] | ParallelSpec,
    device: torch.device | str | None,
    environment: Environment | None = None,
    *,
    limit_s: float | None = None,
) -> World:
    """Check the spec against the running processes, join the job, and make the mesh.

    A single process needs no process group and gets none.

    Args:
        parallel: the spec.
        device: of this rank's tensors; None for the usual one.
        environment: which rank to be, if variables do not say it.
        limit_s: seconds that the other processes are waited for; None for the watchdog's usual ones, 0 for half an hour.

    Raises:
        SpecError: for a spec that is invalid, does not fit the processes, or needs something that is not installed.
        LaunchError: if the other processes cannot be reached.
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
    spec.require_installed()
    place = _device(device)
    if alive is None and size > 1:
        limit = timedelta(seconds=watchdog_limit(limit_s)) or DEFAULT_TIMEOUT
        process = start(environment, device=place, meeting=limit)
        atexit.register(_leave, process)
        place = process.device
    elif alive is not None:
        place = start(environment, device=place).device
    elif place is None:
        place = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    tensor_axes = () if spec.tensor is None else spec.tensor.axis_names
    inner = (*tensor_axes, *(() if spec.axial is None else spec.axial.axes))
    outer = tuple(axis for axis in spec.axes if axis not in inner and axis != PIPE)
    sequence_axes = () if spec.sequence is None else tuple(spec.sequence.axes)
    mesh = Mesh(spec.axes if tensor_axes else {**spec.axes, "tensor": 1})
    warn_of_crossing(mesh, inner, environment or Environment.detect())
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
    if spec.tensor.by_tokens:
        return "1d+tokens"
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
            f"device={device!r} is not a device of torch: write 'cpu', 'cuda' or 'cuda:0', or leave it out"
        ) from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise SpecError(f"device={device!r}: torch sees {found or 'no'} GPUs. Write 'cpu', or leave it out")
    return place


def _leave(process: Process) -> None:
    """Leave the job at exit; a rank that failed does not wait for the others."""
    process.close(wait=not hasattr(sys, "last_value"))


def has_zero(parallel: Mapping[str, object] | ParallelSpec) -> bool:
    """Return True if a spec, parsed or not, has the entry ``zero``."""
    if isinstance(parallel, ParallelSpec):
        return parallel.zero is not None
    return isinstance(parallel, Mapping) and parallel.get("zero") is not None


def has_tensor(parallel: Mapping[str, object] | ParallelSpec) -> bool:
    """Return True if a spec, parsed or not, has the entry ``tensor``."""
    if isinstance(parallel, ParallelSpec):
        return parallel.tensor is not None
    return isinstance(parallel, Mapping) and parallel.get("tensor") is not None


_LONGEST = 1000  # bytes of an error message


def fail_together(world: World, error: Exception | None, what: str, *, name_rank: bool = True) -> None:
    """Raise on every rank the error of any rank, since the others would wait for it forever.

    All ranks must call, which makes it a barrier too.

    Args:
        world: the ranks.
        error: what failed on this one; None for nothing.
        what: the operation, for the error message.
        name_rank: say which rank it was.

    Raises:
        CheckpointError: the same on all ranks, with the message of the first one that failed.
    """
    size, rank = world.mesh.world_size, world.mesh.rank
    if size == 1:  # skip the device, which may be busy
        if error is not None:
            raise CheckpointError(f"{what}: {error}") from error
        return
    worst = torch.tensor(0 if error is None else size - rank, device=world.device)
    failed = size - int(all_reduce(worst, world.everyone, "max"))
    if failed == size:
        return
    text = torch.zeros(_LONGEST, dtype=torch.uint8, device=world.device)
    if failed == rank:
        said = list(str(error or "").encode()[:_LONGEST])
        text[: len(said)] = torch.tensor(said, dtype=torch.uint8)
    text = broadcast(text, world.everyone, failed)
    message = bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
    raise CheckpointError(f"{what}: {f'rank {failed}: ' if name_rank else ''}{message}") from error


def agree(world: World, number: int) -> int:
    """Return the largest number of all ranks; all ranks must call."""
    if world.mesh.world_size == 1:
        return number
    return int(all_reduce(torch.tensor(number, device=world.device), world.everyone, "max"))


def crossing(mesh: Mesh, axes: Sequence[str], ranks_per_node: int) -> list[str]:
    """Return the axes along which some group has ranks of several nodes, if a node has this many consecutive ranks."""
    return [
        axis for axis in axes if any(len({rank // ranks_per_node for rank in ranks}) > 1 for ranks in mesh.groups(axis))
    ]


def warn_of_crossing(mesh: Mesh, axes: Sequence[str], here: Environment) -> None:
    """Warn on rank 0 of tensor axes that leave their node, which communicate in every layer."""
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


def check_watchdog(watchdog: object, check_collectives: object) -> tuple[float | None, bool]:
    """Return the checked arguments ``watchdog`` and ``check_collectives``; None leaves the limit to the environment.

    Raises:
        SpecError: for a limit that is not a number from 0 up, or a switch that is not a bool.
    """
    if watchdog is not None and (
        isinstance(watchdog, bool) or not isinstance(watchdog, int | float) or not 0 <= watchdog < math.inf
    ):
        raise SpecError(
            f"watchdog={watchdog!r}: give the seconds after which an unfinished collective ends the job, such as 600; "
            "0 for no watchdog"
        )
    if check_collectives is not None and not isinstance(check_collectives, bool):
        raise SpecError(f"check_collectives={check_collectives!r}: write True to compare calls between ranks, or False")
    return (None if watchdog is None else float(watchdog)), bool(check_collectives)


def watch_over(world: World, watchdog: float | None, compare: bool) -> Watch:
    """Start the watchdog over this process's collectives; all ranks must call. A single process is not watched."""
    if world.mesh.world_size == 1 and not world.mesh.is_part:
        return Watch(None)
    _, also = watchdog_settings()
    return watch(watchdog_limit(watchdog), compare=compare or also)
