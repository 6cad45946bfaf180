"""Table 2 by arithmetic and on the clock, and the lengths of table 3 by plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.attention_schemes.counting import PRECISION, Problem
from experiments.planned import GB
from experiments.report import read_csv
from experiments.toml_tables import read_tables
from meshfold.mesh import ParallelSpec
from meshfold.models import Llama, LlamaConfig
from meshfold.planner import Machine, estimate, find_machine
from meshfold.planner.clock import Work

FOLDER = Path(__file__).resolve().parent
MACHINE = "a100x8"
K = 1024
BYTES = 6
"""Blocks that a device holds at once in the paper: query, output, and keys and values twice."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama by its sizes: a table of settings.toml."""

    layers: int
    hidden: int
    heads: int
    inner: int

    def build(self, tokens: int) -> Llama:
        """Return the model for sequences of so many tokens."""
        return Llama(
            LlamaConfig(
                vocab_size=32_000,
                hidden=self.hidden,
                layers=self.layers,
                heads=self.heads,
                ffn=self.inner,
                max_positions=tokens,
            )
        )


def everything() -> dict[str, Any]:
    """All numbers."""
    sizes = read_tables(FOLDER / "settings.toml", Size)
    return {
        "blocks": [block(row) for row in read_csv(FOLDER / "published_blocks.csv")],
        "lengths": [length(row, sizes[row["model"]]) for row in read_csv(FOLDER / "published_lengths.csv")],
    }


def block(row: Mapping[str, str]) -> dict[str, Any]:
    """Return thousands of tokens of a block and of a sequence; on the clock for machines that the planner knows."""
    rate, link = float(row["TFLOP/s"]), float(row["GB/s"])
    found: dict[str, Any] = {
        "host": row["host"],
        "published": [float(row["block_k"]), float(row["sequence_k"])],
        "ours": [rate / link, BYTES * rate / link],
    }
    if row["host"].startswith("A100"):
        gpu = find_machine(MACHINE)
        found["clock"] = hiding_block(gpu, gpu.inside if "NVLink" in row["host"] else gpu.between) / 1e3
    return found


def hiding_block(gpu: Machine, link: float) -> int:
    """Return the least tokens of a block whose attention to another takes as long as sending the other's keys and values."""

    def hides(tokens: int) -> bool:
        one = Problem(tokens=tokens, heads=32, kv_heads=32, head_dim=128)
        core = Work(operators={one.operator(tokens**2, "forward"): 1}).phases(gpu, PRECISION).device
        return core >= gpu.latency + 2 * 2 * tokens * one.heads * one.head_dim / link

    low, high = 0, 1
    while not hides(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if hides(middle) else (middle, high)
    return high


def length(row: Mapping[str, str], size: Size) -> dict[str, Any]:
    """Return GB of a GPU at the published length, with a ring and without, there at twice the length too, and what fits.

    Each GPU has a sequence of its own without a ring; parameters and their states are shared by all GPUs, as in the paper.
    A ring over more than eight GPUs is not planned.
    """
    gpus, alone, ring = (int(row[key]) for key in ("gpus", "blockwise", "ring"))
    found: dict[str, Any] = {"gpus": gpus, "model": row["model"], "published": {"blockwise": alone, "ring": ring}}
    found["blockwise"] = [plan(size, False, gpus, times * alone * K) for times in (1, 2)]
    if gpus <= 8:
        found["ring"] = [plan(size, True, gpus, ring * K)]
    return found


def plan(size: Size, ring: bool, gpus: int, tokens: int) -> dict[str, Any]:
    """Return GB of a GPU in float32 with all blocks recomputed, and whether that fits.

    Args:
        size: of the model.
        ring: one sequence over all GPUs; else one for each.
        gpus: all of them.
        tokens: of a sequence.
    """
    split: dict[str, object] = dict(sequence=dict(mode="ring", size=gpus)) if ring else dict(data=gpus)
    spec = ParallelSpec.parse({**split, "zero": dict(stage=3, placement="cuda")})
    machine = find_machine(MACHINE)
    found = estimate(
        lambda: size.build(tokens),
        spec,
        batch_size=1 if ring else gpus,
        seq_len=tokens,
        precision="fp32",
        machine=machine,
        recompute="blocks",
        clip=False,
    )
    return {"tokens": tokens, "GB": found.memory.total / GB, "fits": not found.refusal}
