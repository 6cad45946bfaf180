"""ZeRO and Gemini: a model's parameters, gradients and optimizer state in chunks, sharded, on the device or beside it."""

from __future__ import annotations

from meshfold.zero_gemini.errors import ChunkError, MemoryPlanError, OutOfBudget
from meshfold.zero_gemini.gemini import Gemini
from meshfold.zero_gemini.layout import ChunkLayout, Item, lay_out
from meshfold.zero_gemini.memory import Memory
from meshfold.zero_gemini.optimizers import CPUAdam, HybridAdam
from meshfold.zero_gemini.placing import Home, Shares
from meshfold.zero_gemini.search import ChunkSearch, search_chunk_size
from meshfold.zero_gemini.sharded_init import ShardedInit
from meshfold.zero_gemini.stepping import Entry

__all__ = [
    "CPUAdam",
    "ChunkError",
    "ChunkLayout",
    "ChunkSearch",
    "Entry",
    "Gemini",
    "Home",
    "HybridAdam",
    "Item",
    "Memory",
    "MemoryPlanError",
    "OutOfBudget",
    "ShardedInit",
    "Shares",
    "lay_out",
    "search_chunk_size",
]
