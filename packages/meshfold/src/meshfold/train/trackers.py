"""Trackers that also get a run's metrics: TensorBoard or Weights & Biases, if installed and asked for."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshfold.mesh import SpecError, did_you_mean


class Tracker(Protocol):
    """Takes the numbers of steps."""

    def add(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Those of an optimizer step, or of an evaluation after it."""

    def close(self) -> None:
        """The run is over."""


class TensorBoard:
    """Into the folder ``tensorboard``; what a run that went on from an earlier step had written behind it is not shown."""

    def __init__(self, out: Path, settings: Mapping[str, Any], first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(out / "tensorboard"), purge_step=first + 1 if first else None)
        self._writer.add_text("settings", f"```\n{json.dumps(settings, indent=1, default=str)}\n```")

    def add(self, step: int, numbers: Mapping[str, Any]) -> None:
        for name, value in numbers.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of the project ``meshfold``, or of ``WANDB_PROJECT``; one that goes on is the same run there."""

    def __init__(self, out: Path, settings: Mapping[str, Any], first: int) -> None:
        wandb: Any = importlib.import_module("wandb")
        kept = out / "wandb-run.txt"
        run = kept.read_text().strip() if first and kept.exists() else None
        self._run: Any = wandb.init(
            project=None if _named() else "meshfold",
            dir=str(out),
            config=dict(settings),
            id=run,
            resume="allow",
        )
        kept.write_text(str(self._run.id))

    def add(self, step: int, numbers: Mapping[str, Any]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


_KNOWN: dict[str, tuple[str, type[TensorBoard] | type[WandB]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WandB),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raises:
    SpecError: for one that is not known, or not installed.
    """
    for name in names:
        if name not in _KNOWN:
            raise SpecError(
                f"--metrics {name}: there is no {name!r}.{did_you_mean(name, _KNOWN)} Known: {', '.join(_KNOWN)}; "
                "metrics.jsonl is always written"
            )
        module = _KNOWN[name][0]
        if importlib.util.find_spec(module) is None:
            raise SpecError(f"--metrics {name}: {module} is not installed: pip install {module}")


def open_trackers(
    names: Sequence[str], out: Path, settings: Mapping[str, Any], *, first: int
) -> list[Tracker]:
    """Those asked for; one rank calls.

    Args:
        names: see :func:`check_trackers`.
        out: the run's folder.
        settings: shown beside the numbers.
        first: the step that the run goes on from; 0 at its start.
    """
    check_trackers(names)
    return [_KNOWN[name][1](out, settings, first) for name in names]


def _named() -> bool:
    wandb: Any = importlib.import_module("wandb")
    return bool(getattr(wandb.setup().settings, "project", None))
