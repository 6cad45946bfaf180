"""Options of a plan: one of five for a chunk, kept or not for a layer, a clipping strategy for the step.

The parameter plane is half of the split master, so it is on the device that steps the chunk. That leaves five options: state on the
GPU with its parameters, or state on the host or on disk, each with parameters resident on the GPU or streamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

STATE = ("gpu", "host", "host", "disk", "disk")
"""where the optimizer state of each option lives"""
PARAMETERS = ("gpu", "gpu", "host", "gpu", "host")
"""where its parameters live between uses; gpu: resident, host: streamed"""
ALL_GPU, HOST_RESIDENT, HOST_STREAMED, DISK_RESIDENT, DISK_STREAMED = range(5)

NONE = "none"
SPLIT_STEP = "just_in_time_split"
"""Strategy: clip, write the new master weights before the next forward, and the moments in its backward."""
SPLIT_STEP_ON_DEVICE = "just_in_time_split_on_device"
"""Strategy: a split step; moments of chunks that the device steps are also written in the backward."""
SPECULATIVE_STEP = "out_of_place"
"""Strategy: step in the backward into a second buffer, and keep it if the clipping factor is 1."""
STRATEGIES = {
    NONE: "no clipping: step in the backward",
    SPLIT_STEP: "clip, new master before the next forward, moments in the backward",
    SPLIT_STEP_ON_DEVICE: "clip, new master before the next forward, moments in the backward also of what the device steps",
    SPECULATIVE_STEP: "clip, step in the backward into a second buffer, keep it if the factor is 1",
}

GPU_ONLY, WITH_HOST, WITH_DISK = "gpu", "host", "disk"
MODES = {GPU_ONLY: (0,), WITH_HOST: (0, 1, 2), WITH_DISK: (0, 1, 2, 3, 4)}
"""Options that a mode allows. A mode's fixed cost (rings, blocks in flight) is charged in full."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """An option for every chunk, and for every layer 1 (kept) or 0 (recomputed)."""

    chunks: Ints
    layers: Ints

    def same(self, other: Choice) -> bool:
        """Return True if both choose the same options."""
        return bool((self.chunks == other.chunks).all() and (self.layers == other.layers).all())


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Named sums that are linear in the choice: ``base + Σ chunk[i, option] + Σ layer[j, kept]``.

    base: row; chunk: chunk option row; layer: layer kept row.
    """

    names: tuple[str, ...]
    base: Floats
    chunk: Floats
    layer: Floats

    def at(self, choice: Choice) -> Floats:
        """Return the sums of one choice; shape: row."""
        rows = self.base + self.chunk[np.arange(len(choice.chunks)), choice.chunks].sum(0)
        chosen: Floats = rows + self.layer[np.arange(len(choice.layers)), choice.layers].sum(0)
        return chosen


class Builder:
    """Builder of a Table's rows."""

    def __init__(self, chunks: int, layers: int) -> None:
        self.chunks, self.layers = chunks, layers
        self.names: list[str] = []
        self._base: list[Floats] = []
        self._chunk: list[Floats] = []
        self._layer: list[Floats] = []

    def add(self, *names: str, base: Any = 0.0, chunk: Any = None, layer: Any = None) -> None:
        """Add rows ``names``. base: row; chunk: chunk option row; layer: layer row, what keeping (second) or not costs."""
        count = len(names)
        self.names += names
        self._base.append(np.broadcast_to(np.asarray(base, dtype=float), (count,)))
        for parts, value, shape in (
            (self._chunk, chunk, (self.chunks, 5, count)),
            (self._layer, layer, (self.layers, 2, count)),
        ):
            given = np.zeros(shape) if value is None else np.asarray(value, dtype=float)
            parts.append(given[..., None] if given.ndim == 2 else given)

    def table(self) -> Table:
        return Table(
            names=tuple(self.names),
            base=np.concatenate(self._base),
            chunk=np.concatenate(self._chunk, axis=2),
            layer=np.concatenate(self._layer, axis=2),
        )
