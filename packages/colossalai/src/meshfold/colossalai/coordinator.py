"""``DistCoordinator``: which process this is, and turns of one before the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from meshfold.engine.world import join_world
from meshfold.mesh import Environment, barrier

T = TypeVar("T")


class DistCoordinator:
    """This process among all.

    Attributes:
        rank: its number.
        world_size: how many there are.
        local_rank: its number on this machine.
    """

    def __init__(self) -> None:
        self._world = join_world({}, None)
        self.rank, self.world_size = self._world.mesh.rank, self._world.mesh.world_size
        self.local_rank = Environment.detect().local_rank

    def is_master(self) -> bool:
        """Tell whether this process is the first."""
        return self.rank == 0

    def is_node_master(self) -> bool:
        """Tell whether this process is the first on its machine."""
        return self.local_rank == 0

    def is_last_process(self) -> bool:
        """Tell whether this process is the last."""
        return self.rank == self.world_size - 1

    def print_on_master(self, text: object) -> None:
        """Print on the first one alone."""
        if self.is_master():
            print(text)

    def print_on_node_master(self, text: object) -> None:
        """Print on the first of each machine."""
        if self.is_node_master():
            print(text)

    def block_all(self) -> None:
        """Wait for all the others."""
        if self.world_size > 1:
            barrier(self._world.everyone)

    @contextmanager
    def priority_execution(self, executor_rank: int = 0) -> Iterator[None]:
        """One process goes through it, then all the others: it downloads or unpacks what all read."""
        mine = self.rank == executor_rank
        if not mine:
            self.block_all()
        try:
            yield
        finally:
            if mine:
                self.block_all()

    def on_master_only(self) -> Callable[[Callable[..., T]], Callable[..., T | None]]:
        """A decorator: the function runs on the first process alone, and gives None on the others."""

        def decorate(function: Callable[..., T]) -> Callable[..., T | None]:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> T | None:
                return function(*args, **kwargs) if self.is_master() else None

            return wrapper

        return decorate
