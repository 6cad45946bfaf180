"""What a contestant is asked to do, and what it has to offer for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Job:
    """One contestant's work, as it goes to its process.

    Attributes:
        contestant: its name in the table.
        module: has ``build(job)``.
        options: what the table of contestants gives to that module.
        layers, hidden, heads: of the decoder.
        palm: the preset of a PaLM that takes the decoder's place; "": none.
        rows, seq_len: sequences a step on each rank, and their tokens.
        gpu_limit: bytes that this process may have of the GPU; 0 for all of it.
        host_limit: bytes of host memory, children included; 0 for no limit.
        clip: largest norm of the gradient; None: not clipped.
        lr: learning rate.
        regime: of ours.
        disk: folder for what goes to disk; None for none.
        warm_up, steps: steps that are not timed, then steps that are.
        cores: of each rank.
        ranks: processes, one a GPU.
        flags: settings of the contestant's library on top of the ones it starts from.
        search: look for the largest number of rows first, starting with ``rows``.
        low, high: rows known to fit, and known not to (0: not known).
        out: where rank 0 writes what it found.
    """

    contestant: str
    module: str
    options: dict[str, Any]
    layers: int
    hidden: int
    heads: int
    rows: int
    seq_len: int
    palm: str = ""
    gpu_limit: int = 0
    host_limit: int = 0
    clip: float | None = 1.0
    lr: float = 1e-4
    regime: str = "A"
    disk: str | None = None
    warm_up: int = 2
    steps: int = 3
    cores: int = 16
    ranks: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    search: bool = False
    low: int = 0
    high: int = 0
    out: str = ""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Layers, hidden size, heads, sequence length: the decoder's arguments."""
        return self.layers, self.hidden, self.heads, self.seq_len

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Job:
        """From JSON."""
        return Job(**json.loads(path.read_text()))


class Trainer(Protocol):
    """A contestant that is ready to train.

    Attributes:
        flags: of its library, as they are in force; for the result.
        parameters: how many it trains, counted on its own model.
        device: where it wants the token ids.
    """

    flags: dict[str, Any]
    parameters: int
    device: torch.device

    def step(self, ids: Tensor) -> tuple[float, float | None]:
        """Train on ``b s`` ids: the loss, and the gradient's norm before clipping."""

    def predicted(self) -> dict[str, Any]:
        """What it said beforehand of a step: ``seconds``, ``peak_gpu_bytes``, ``peak_host_bytes``, and what from."""

    def close(self) -> None:
        """Give everything back."""


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with some replaced: keys may be dotted, ``{"zero_optimization.sub_group_size": 1e8}``."""
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in more.items():
        place, *rest = key.split(".", 1)
        if rest:
            found[place] = merged(found.get(place, {}), {rest[0]: value})
        else:
            found[place] = value
    return found


def gpu_or_cpu(rank: int = 0) -> torch.device:
    """This rank's GPU, or the CPU where there is none (to try things out)."""
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
