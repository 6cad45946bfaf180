"""ZeRO and Gemini: a model's parameters, gradients and optimizer state in chunks, sharded, on the device or on the host."""

from __future__ import annotations

import warnings
from typing import Any

from meshfold.zero_gemini import moved
from meshfold.zero_gemini.auto_placement import AutoPlacement, carry_out
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.chunk_size import ChunkSearch, search_chunk_size
from meshfold.zero_gemini.chunks.layout import ChunkLayout, Item, lay_out
from meshfold.zero_gemini.chunks.parameter_table import slot_alignment
from meshfold.zero_gemini.chunks.placement import (
    ChunkPlacement,
    Move,
    ParameterBudget,
    PlacementRule,
    Shares,
    in_turn,
)
from meshfold.zero_gemini.chunks.states import BackwardRole, check_transition
from meshfold.zero_gemini.errors import ChunkError, DiskError, MemoryPlanError, OutOfBudget
from meshfold.zero_gemini.gemini import Gemini
from meshfold.zero_gemini.memory.arena import Memory, MemoryTier
from meshfold.zero_gemini.optimizer import Entry
from meshfold.zero_gemini.optimizers import CPUAdam, HybridAdam
from meshfold.zero_gemini.runtime.captured_moves import CapturedMoves
from meshfold.zero_gemini.runtime.graph_segments import Segments, segments_on
from meshfold.zero_gemini.sharded_init import ShardedInit

moved.install()


def __getattr__(name: str) -> Any:
    """Return the class that version 0.1 called ``Home``, with a DeprecationWarning."""
    if name != "Home":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = "meshfold.zero_gemini.Home is now meshfold.zero_gemini.ChunkPlacement: change the import"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return ChunkPlacement


__all__ = [
    "AutoPlacement",
    "BackwardRole",
    "CPUAdam",
    "CapturedMoves",
    "Chunk",
    "ChunkError",
    "ChunkLayout",
    "ChunkPlacement",
    "ChunkSearch",
    "DiskError",
    "Entry",
    "Gemini",
    "HybridAdam",
    "Item",
    "Memory",
    "MemoryPlanError",
    "MemoryTier",
    "Move",
    "OutOfBudget",
    "ParameterBudget",
    "PlacementRule",
    "Segments",
    "ShardedInit",
    "Shares",
    "carry_out",
    "check_transition",
    "in_turn",
    "lay_out",
    "search_chunk_size",
    "segments_on",
    "slot_alignment",
]
