"""A world of any size in one process, for tests that record what would be sent and send nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshfold.mesh.processes.process_group import Process, start_fake


@contextmanager
def fake_world(n: int, rank: int = 0) -> Iterator[Process]:
    """Be one of ``n`` ranks that are not there. Collectives return at once with meaningless values.

    Raises:
        LaunchError: if a process group is already running in this process.
    """
    with start_fake(n, rank) as process:
        yield process
