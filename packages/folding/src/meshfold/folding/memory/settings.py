"""Settings of memory: chunks and recomputation, which cost time."""

from __future__ import annotations

from dataclasses import dataclass

from meshfold.mesh import MeshfoldError, did_you_mean

RECOMPUTE = ("none", "updates", "blocks", "both")
"""Names of what backward computes again; see :class:`MemorySettings`."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Limits of what folding blocks hold at once, and of what they keep for backward.

    Outputs and gradients are the same under all settings. :func:`meshfold.folding.plan_memory` chooses them.

    Attributes:
        chunk_bytes: of the intermediates of one update (attention, triangle multiplication, transition) that are alive at once,
            beside its input and output; None: updates run whole. A single row, or a single channel of a triangle
            multiplication, is never divided.
        recompute: in training. ``"none"``: everything is kept. ``"updates"``: each update keeps its input only. ``"blocks"``:
            each block keeps its input only. ``"both"``: the same, and in the repetition of a block each update keeps its input
            only. Chunks reduce the memory of training only where updates are recomputed.

    Raises:
        MeshfoldError: for fewer bytes than 1 or another word, or chunks in training that would be kept.
    """

    chunk_bytes: int | None = None
    recompute: str = "none"

    def __post_init__(self) -> None:
        if self.chunk_bytes is not None and (type(self.chunk_bytes) is not int or self.chunk_bytes < 1):
            raise MeshfoldError(
                f"chunk_bytes={self.chunk_bytes!r}: give a whole number of bytes, such as {1 << 28} for "
                "256 MiB, or None for no chunks"
            )
        if self.recompute not in RECOMPUTE:
            hint = did_you_mean(self.recompute, RECOMPUTE) if isinstance(self.recompute, str) else ""
            raise MeshfoldError(
                f"recompute={self.recompute!r} is not known: write one of {', '.join(map(repr, RECOMPUTE))}.{hint}"
            )

    @property
    def recomputes_updates(self) -> bool:
        """True if each update keeps its input only."""
        return self.recompute in ("updates", "both")

    @property
    def recomputes_blocks(self) -> bool:
        """True if each block keeps its input only."""
        return self.recompute in ("blocks", "both")

    def count(self, length: int, line_bytes: int) -> int:
        """Return the parts of an update with ``length`` lines, whose intermediates have ``line_bytes`` bytes a line."""
        if self.chunk_bytes is None or length <= 1:
            return 1
        return -(-length // max(self.chunk_bytes // max(line_bytes, 1), 1))

    def __str__(self) -> str:
        chunks = "no chunks" if self.chunk_bytes is None else f"chunks of {_size(self.chunk_bytes)}"
        kept = {
            "none": "",
            "updates": ", updates recomputed",
            "blocks": ", blocks recomputed",
            "both": ", blocks and updates recomputed",
        }
        return chunks + kept[self.recompute]


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count} bytes"


KEEP_ALL = MemorySettings()
"""No chunks, no recomputation."""
