"""Metrics of a run: ``metrics.jsonl`` with a JSON object a step, trackers (TensorBoard, Weights & Biases), FLOPs for MFU."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from meshfold.checkpoint.files import name_in_errors, write_atomically
from meshfold.mesh import SpecError, did_you_mean
from meshfold.planner import PEAK_TFLOPS


class MetricsFile:
    """Collector of rows, which the writing rank appends to the file at once."""

    def __init__(self, path: Path, *, keep: int = 0, write: bool = True) -> None:
        """Args:
        path: the file.
        keep: rows of later steps are dropped from an existing file, since the run continued elsewhere.
        write: whether to write.
        """
        self._path, self._write = path, write
        self.trackers: list[Tracker] = []
        self.rows = [row for row in read_metrics(path) if row["step"] <= keep] if keep else []
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written to a new file and renamed: a process killed here loses no rows.
            text = "".join(json.dumps(row) + "\n" for row in self.rows)
            write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))

    def add(self, **row: Any) -> None:
        """Add a row."""
        self.rows.append(row)
        if self._write:
            with name_in_errors(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        for tracker in self.trackers:
            tracker.add(row["step"], {name: value for name, value in row.items() if name != "step"})

    def close(self) -> None:
        """End the run."""
        for tracker in self.trackers:
            tracker.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none without a file. An incomplete last line of a killed run is left out."""
    if not path.exists():
        return []
    rows = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(text))
        except ValueError:
            break
    return rows


class Tracker(Protocol):
    """Protocol of an additional receiver of metrics."""

    def add(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Add the numbers of an optimizer step, or of an evaluation after it."""

    def close(self) -> None:
        """End the run."""


class TensorBoard:
    """Tracker that writes to the folder ``tensorboard``; steps after the one that a run resumes from are hidden."""

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
    """Tracker of Weights & Biases, in the project ``meshfold`` or ``WANDB_PROJECT``; a resumed run stays one run."""

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
    """Check the names of trackers.

    Raises:
        SpecError: for one that is unknown or not installed.
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


def open_trackers(names: Sequence[str], out: Path, settings: Mapping[str, Any], *, first: int) -> list[Tracker]:
    """Return the trackers asked for; one rank calls.

    Args:
        names: see :func:`check_trackers`.
        out: the run's folder.
        settings: shown with the metrics.
        first: the step that the run resumes from; 0 at its start.
    """
    check_trackers(names)
    return [_KNOWN[name][1](out, settings, first) for name in names]


def _named() -> bool:
    wandb: Any = importlib.import_module("wandb")
    return bool(getattr(wandb.setup().settings, "project", None))


def flops_per_token(build: Callable[[], nn.Module], seq_len: int) -> float:
    """Return the operations for one token of a sequence, forward and backward: ``6 N + 12 L h s``.

    N counts parameters used in products (all except lookup tables); L attention layers of width h (all heads
    together) run over s tokens, or over ``window`` if that is shorter. The causal mask is not subtracted, and recomputation
    is not counted. Source: Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B.

    Args:
        build: makes the model; it is run without allocating.
        seq_len: tokens of a sequence.
    """
    with torch.device("meta"):
        model = build()
    parameters = {id(p): p.numel() for p in model.parameters()}
    multiplies = {id(m.weight) for m in model.modules() if not isinstance(m, nn.Embedding) and hasattr(m, "weight")}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in multiplies:
            parameters.pop(id(module.weight), None)
    config = getattr(model, "config", None)
    layers = _first(config, "layers", "num_hidden_layers", "n_layer")
    width = _first(config, "heads", "num_attention_heads", "n_head") * _first(config, "head_dim")
    width = width or _first(config, "hidden", "hidden_size", "n_embd")
    seen = min(seq_len, getattr(config, "window", None) or seq_len)
    return 6.0 * sum(parameters.values()) + 12.0 * layers * width * seen


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the data sheet's operations a second of this rank's device, or None if the table has no such device."""
    return peak_of_gpu(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def peak_of_gpu(name: str, precision: str) -> float | None:
    """Return the data sheet's operations a second of a GPU, by the name that torch gives it; None if unknown."""
    found = next((peaks for key, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)), None)
    return None if found is None else found[precision] * 1e12


def _first(config: object, *names: str) -> int:
    """Return the first of these integers that a configuration has, or 0."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
