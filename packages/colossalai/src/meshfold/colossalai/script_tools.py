"""Small helpers that scripts for Colossal-AI begin with: the parser of the command line, the logger, the device."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from meshfold.colossalai.context import ParallelMode, gpc
from meshfold.engine.world import join_world
from meshfold.mesh import Environment, SpecError, did_you_mean

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def get_default_parser() -> argparse.ArgumentParser:
    """A parser with ``--config`` and what their launchers passed, which does nothing here; the script adds its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="Python file with the settings")
    for name in ("host", "port", "world_size", "rank", "local_rank", "backend"):
        kind = str if name in ("host", "backend") else int
        parser.add_argument(
            f"--{name}", type=kind, help="does nothing: meshfold run, torchrun or Slurm say it"
        )
    return parser


def get_current_device() -> torch.device:
    """This rank's: its GPU where there is one for each rank, else the CPU."""
    return join_world({}, None).device


def is_using_pp() -> bool:
    """Tell whether the launched config has a pipeline."""
    return gpc.is_initialized(ParallelMode.PIPELINE) and gpc.get_world_size(ParallelMode.PIPELINE) > 1


def is_using_ddp() -> bool:
    """Tell whether data ranks have different rows."""
    return gpc.is_initialized(ParallelMode.DATA) and gpc.get_world_size(ParallelMode.DATA) > 1


def disable_existing_loggers(
    include: Collection[str] | None = None, exclude: Collection[str] = ("meshfold",)
) -> None:
    """Loggers that are there say warnings and errors only.

    Args:
        include: these alone; None for all but ``exclude``.
        exclude: not these.
    """
    for name in list(logging.Logger.manager.loggerDict):
        if name in include if include is not None else name not in exclude:
            logging.getLogger(name).setLevel(logging.WARNING)


class DistributedLogger:
    """A logger whose messages may be of some ranks alone: ``logger.info("ready", ranks=[0])``.

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
        """Say messages of this level and above."""
        self.logger.setLevel(_checked(level))

    def log_to_file(
        self, path: str | os.PathLike[str], mode: str = "a", level: str = "INFO", suffix: str | None = None
    ) -> None:
        """Write messages to ``rank_<rank>.log`` in a folder too.

        Args:
            path: the folder; it is made.
            mode: ``"a"`` goes on in a file that is there, ``"w"`` writes it anew.
            level: messages of this level and above.
            suffix: at the end of the file's name.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"rank_{_rank()}{f'_{suffix}' if suffix else ''}.log"
        handler = logging.FileHandler(file, mode)
        handler.setLevel(_checked(level))
        self._add(handler)

    def info(
        self,
        message: str,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """On these ranks of the group; None for all."""
        self._log(logging.INFO, message, parallel_mode, ranks)

    def warning(
        self,
        message: str,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """On these ranks of the group; None for all."""
        self._log(logging.WARNING, message, parallel_mode, ranks)

    def debug(
        self,
        message: str,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """On these ranks of the group; None for all."""
        self._log(logging.DEBUG, message, parallel_mode, ranks)

    def error(
        self,
        message: str,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """On these ranks of the group; None for all."""
        self._log(logging.ERROR, message, parallel_mode, ranks)

    def _log(self, level: int, message: str, mode: ParallelMode, ranks: Sequence[int] | None) -> None:
        if ranks is None or (_rank() if mode is ParallelMode.GLOBAL else gpc.get_local_rank(mode)) in ranks:
            self.logger.log(level, message, stacklevel=3)

    def _add(self, handler: logging.Handler) -> None:
        handler.setFormatter(logging.Formatter("%(name)s - %(levelname)s: %(message)s"))
        self.logger.addHandler(handler)


def get_dist_logger(name: str = "meshfold") -> DistributedLogger:
    """A logger whose messages may be of some ranks alone."""
    return DistributedLogger(name)


def _rank() -> int:
    return Environment.detect().rank


def _checked(level: str) -> str:
    if level not in _LEVELS:
        raise SpecError(
            f"level={level!r}: it is one of {', '.join(_LEVELS)}.{did_you_mean(str(level), _LEVELS)}"
        )
    return level
