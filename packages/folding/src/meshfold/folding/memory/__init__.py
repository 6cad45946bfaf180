"""Memory of folding blocks: settings that blocks obey, and updates in parts."""

from __future__ import annotations

from meshfold.folding.memory.parts import Parts, add_update, own_tensor, run_block, run_parts, some_lines
from meshfold.folding.memory.settings import KEEP_ALL, RECOMPUTE, MemorySettings

__all__ = [
    "KEEP_ALL",
    "RECOMPUTE",
    "MemorySettings",
    "Parts",
    "add_update",
    "own_tensor",
    "run_block",
    "run_parts",
    "some_lines",
]
