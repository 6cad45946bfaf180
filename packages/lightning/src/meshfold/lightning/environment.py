"""Cluster environments: how processes are started, and the rank of this one."""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment
from meshfold.mesh import LaunchError
from meshfold.mesh.processes import Environment, running_world


class RunningRanks(ClusterEnvironment):
    """Environment for processes that are already connected, by ``meshfold.mesh.start()`` or ``init_process_group``.

    The trainer then starts none: ``Trainer(devices=..., strategy=MeshfoldStrategy(cluster_environment=RunningRanks()))``, where
    ``devices`` is their number on this machine.
    """

    def __init__(self) -> None:
        """Raises:
        LaunchError: if no process group is running.
        """
        here = running_world()
        if here is None:
            raise LaunchError(
                "RunningRanks() without a process group: call meshfold.mesh.start() first, or leave "
                "cluster_environment out and let the trainer start the processes"
            )
        self._rank, self._size = here.rank, here.size
        place = Environment.detect()
        known = place.world_size == here.size
        self._local_rank, self._local_size = (
            (place.local_rank, place.local_world_size) if known else (here.rank, here.size)
        )

    @property
    def creates_processes_externally(self) -> bool:
        """True: no processes are started."""
        return True

    @property
    def main_address(self) -> str:
        """Unused: the processes are connected."""
        return "localhost"

    @property
    def main_port(self) -> int:
        """Unused: the processes are connected."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return True if a process group is running."""
        return running_world() is not None

    def world_size(self) -> int:
        """Return the number of processes."""
        return self._size

    def set_world_size(self, size: int) -> None:
        """Check the trainer's number of processes.

        Raises:
            LaunchError: if it is not the number that is running.
        """
        if size != self._size:
            raise LaunchError(
                f"the trainer was given {size} processes (devices times num_nodes), but {self._size} are running: write "
                f"Trainer(devices={self._local_size})"
            )

    def global_rank(self) -> int:
        """Return this process's rank."""
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is fixed."""

    def local_rank(self) -> int:
        """Return this process's rank on its machine."""
        return self._local_rank

    def node_rank(self) -> int:
        """Return the number of its machine."""
        return self._rank // self._local_size


def environment_of(cluster: ClusterEnvironment, local_size: int) -> Environment:
    """Return the mesh's environment for this process as a rank of the job."""
    if cluster.world_size() == 1:
        return Environment()
    return Environment(
        rank=cluster.global_rank(),
        world_size=cluster.world_size(),
        local_rank=cluster.local_rank(),
        local_world_size=local_size,
        master_addr=cluster.main_address,
        master_port=cluster.main_port,
        source="torchrun",
    )


def is_set_by_launcher() -> bool:
    """Return True if ``meshfold run``, torchrun or the like has set the variables of this rank.

    Lightning's own environment would remove WORLD_SIZE at the end of a stage, which a later trainer or engine needs.
    """
    try:
        return Environment.detect().source == "torchrun"
    except LaunchError:  # only some are set: Lightning's launcher did it
        return False
