"""ZeRO and Gemini: a model's parameters, gradients and optimizer state in chunks, sharded, on the device or beside it."""

from __future__ import annotations

from meshfold.zero_gemini.errors import ChunkError, MemoryPlanError, OutOfBudget
from meshfold.zero_gemini.gemini import Gemini, Placing
from meshfold.zero_gemini.layout import ChunkLayout, Item, lay_out
from meshfold.zero_gemini.search import ChunkSearch, search_chunk_size
from meshfold.zero_gemini.stepping import Entry

__all__ = [
    "ChunkError",
    "ChunkLayout",
    "ChunkSearch",
    "Entry",
    "Gemini",
    "Item",
    "MemoryPlanError",
    "OutOfBudget",
    "Placing",
    "lay_out",
    "search_chunk_size",
]
