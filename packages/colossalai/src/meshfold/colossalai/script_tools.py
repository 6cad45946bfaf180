"""Helpers of Colossal-AI scripts: parser, logger, device, accelerator and coordinator."""

from __future__ import annotations

import argparse
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from meshfold.colossalai.context import ParallelMode, gpc
from meshfold.engine.world import join_world
from meshfold.mesh import Environment, SpecError, barrier, did_you_mean

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def get_default_parser() -> argparse.ArgumentParser:
    """Return a parser with ``--config`` and arguments of Colossal-AI's launchers, which do nothing; the script adds its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="Python file with the settings")
    for name in ("host", "port", "world_size", "rank", "local_rank", "backend"):
        kind = str if name in ("host", "backend") else int
        parser.add_argument(f"--{name}", type=kind, help="does nothing: meshfold run, torchrun or Slurm say it")
    return parser


def get_current_device() -> torch.device:
    """Return this rank's device: its GPU if there is one for each rank, else the CPU."""
    return join_world({}, None).device


def is_using_pp() -> bool:
    """Return True if the launched config has a pipeline."""
    return gpc.is_initialized(ParallelMode.PIPELINE) and gpc.get_world_size(ParallelMode.PIPELINE) > 1


def is_using_ddp() -> bool:
    """Return True if data ranks have different rows."""
    return gpc.is_initialized(ParallelMode.DATA) and gpc.get_world_size(ParallelMode.DATA) > 1


def disable_existing_loggers(include: Collection[str] | None = None, exclude: Collection[str] = ("meshfold",)) -> None:
    """Limit existing loggers to warnings and errors.

    Args:
        include: only these; None for all except ``exclude``.
        exclude: not these.
    """
    for name in list(logging.Logger.manager.loggerDict):
        if name in include if include is not None else name not in exclude:
            logging.getLogger(name).setLevel(logging.WARNING)


class DistributedLogger:
    """A logger whose messages may be limited to some ranks: ``logger.info("ready", ranks=[0])``.

    Attributes:
        logger: of :mod:`logging`.
    """

    def __init__(self, name: str) -> None:
        self.logger = logging.getLogger(name)
        if not self.logger.handlers:
            self._add(logging.StreamHandler())
            self.logger.setLevel(logging.INFO)
            self.logger.propagate = False

    def set_level(self, level: str) -> None:
        """Set the level of messages."""
        self.logger.setLevel(_checked(level))

    def log_to_file(
        self, path: str | os.PathLike[str], mode: str = "a", level: str = "INFO", suffix: str | None = None
    ) -> None:
        """Also write messages to ``rank_<rank>.log`` in a folder.

        Args:
            path: the folder, which is made if needed.
            mode: ``"a"`` appends to an existing file, ``"w"`` replaces it.
            level: messages of this level and above.
            suffix: of the file's name.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"rank_{Environment.detect().rank}{f'_{suffix}' if suffix else ''}.log"
        handler = logging.FileHandler(file, mode)
        handler.setLevel(_checked(level))
        self._add(handler)

    def _log(
        self,
        level: int,
        message: str,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log a message on these ranks of the group; None for all."""
        if ranks is None or _rank_in(parallel_mode) in ranks:
            self.logger.log(level, message, stacklevel=2)

    debug = functools.partialmethod(_log, logging.DEBUG)
    info = functools.partialmethod(_log, logging.INFO)
    warning = functools.partialmethod(_log, logging.WARNING)
    error = functools.partialmethod(_log, logging.ERROR)

    def _add(self, handler: logging.Handler) -> None:
        handler.setFormatter(logging.Formatter("%(name)s - %(levelname)s: %(message)s"))
        self.logger.addHandler(handler)


def get_dist_logger(name: str = "meshfold") -> DistributedLogger:
    """Return a logger whose messages may be limited to some ranks."""
    return DistributedLogger(name)


def _rank_in(mode: ParallelMode) -> int:
    return Environment.detect().rank if mode is ParallelMode.GLOBAL else gpc.get_local_rank(mode)


def _checked(level: str) -> str:
    if level not in _LEVELS:
        raise SpecError(f"level={level!r}: it is one of {', '.join(_LEVELS)}.{did_you_mean(str(level), _LEVELS)}")
    return level


T = TypeVar("T")


class DistCoordinator:
    """Coordinator of processes.

    Attributes:
        rank: of this process.
        world_size: number of processes.
        local_rank: its number on this machine.
    """

    def __init__(self) -> None:
        self._world = join_world({}, None)
        self.rank, self.world_size = self._world.mesh.rank, self._world.mesh.world_size
        self.local_rank = Environment.detect().local_rank

    def is_master(self) -> bool:
        """Return True if this process is the first."""
        return self.rank == 0

    def is_node_master(self) -> bool:
        """Return True if this process is the first on its machine."""
        return self.local_rank == 0

    def is_last_process(self) -> bool:
        """Return True if this process is the last."""
        return self.rank == self.world_size - 1

    def print_on_master(self, text: object) -> None:
        """Print on the first process only."""
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
        """Context manager: one process runs the block, then the others, for example to download what all read."""
        mine = self.rank == executor_rank
        if not mine:
            self.block_all()
        try:
            yield
        finally:
            if mine:
                self.block_all()

    def on_master_only(self) -> Callable[[Callable[..., T]], Callable[..., T | None]]:
        """Return a decorator: the function runs only on the first process, and returns None on the others."""

        def decorate(function: Callable[..., T]) -> Callable[..., T | None]:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> T | None:
                return function(*args, **kwargs) if self.is_master() else None

            return wrapper

        return decorate


class Accelerator:
    """This rank's GPU, or the CPU.

    Attributes:
        name: ``"cuda"`` or ``"cpu"``.
        communication_backend: of torch.distributed.
    """

    def __init__(self) -> None:
        self.name = get_current_device().type
        self.communication_backend = "gloo" if self.name == "cpu" else "nccl"

    def get_current_device(self) -> torch.device:
        """Return this rank's device."""
        return get_current_device()

    def current_device(self) -> int | str:
        """Return its index, or ``"cpu"``."""
        index = get_current_device().index
        return "cpu" if index is None else index

    def set_device(self, device: Any = None) -> None:
        """Do nothing: each rank has its own device."""

    def set_to_device(self, models: Any) -> Any:
        """Return a model, or several, on this rank's device."""
        if isinstance(models, list):
            return [model.to(get_current_device()) for model in models]
        return models.to(get_current_device())

    def is_available(self) -> bool:
        """Return True if the device exists."""
        return self.name == "cpu" or torch.cuda.is_available()

    def device_count(self) -> int:
        """Return the number of devices on this machine."""
        return 1 if self.name == "cpu" else torch.cuda.device_count()

    def synchronize(self, device: Any = None) -> None:
        """Wait for the device."""
        if self.name != "cpu":
            torch.cuda.synchronize(device)

    def empty_cache(self) -> None:
        """Release unused cached memory."""
        if self.name != "cpu":
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        """Seed torch's random numbers of this process."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def memory_allocated(self, device: Any = None) -> int:
        """Return the bytes in tensors on the device; 0 on the CPU."""
        return 0 if self.name == "cpu" else torch.cuda.memory_allocated(device)

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the peak of these bytes; 0 on the CPU."""
        return 0 if self.name == "cpu" else torch.cuda.max_memory_allocated(device)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Reset the peak."""
        if self.name != "cpu":
            torch.cuda.reset_peak_memory_stats(device)

    def __getattr__(self, name: str) -> Any:
        """Return any other name of torch.cuda.

        Raises:
            AttributeError: on the CPU, and for names that torch.cuda does not have, with what to write.
        """
        if name.startswith("_") or self.name == "cpu" or not hasattr(torch.cuda, name):
            raise AttributeError(f"get_accelerator() has no {name!r} on {self.name}: ask torch, or torch.cuda")
        return getattr(torch.cuda, name)


def get_accelerator() -> Accelerator:
    """Return the device type that this rank computes on."""
    return Accelerator()
