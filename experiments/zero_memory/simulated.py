"""Both tables by their formulas, and what the library's plans hold and send for a model of 1.6 billion parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.report import read_csv
from meshfold.mesh import ParallelSpec
from meshfold.models import GPT, GPTConfig
from meshfold.planner import estimate, unlimited_machine

FOLDER = Path(__file__).resolve().parent
SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
MEMORY = 32e9  # bytes of a GPU of table 2
STAGES = (1, 2, 3)
RANKS = (4, 64)
CONFIG = GPTConfig(vocab_size=50_304, hidden=1600, layers=48, heads=25, max_positions=1024, tie=False)
TOKENS = 32  # of a sequence, one on each rank: states do not depend on them


def everything() -> dict[str, Any]:
    """All numbers."""
    states = [
        {
            "model": row["model"],
            "ranks": int(row["ranks"]),
            "published": [float(row[f"stage {stage}"]) for stage in STAGES],
            "ours": [bytes_a_parameter(stage, int(row["ranks"])) * SIZES[row["model"]] / 1e9 for stage in STAGES],
        }
        for row in read_csv(FOLDER / "published_states.csv")
    ]
    columns = {"baseline": 0, "stage 1": 1, "stage 2": 2, "stage 3": 3}
    models = [
        {
            "GPUs": int(row["GPUs"]),
            "published": {name: float(row[name]) for name in columns},
            "ours": {
                name: int(row["tensor"])
                * MEMORY
                / bytes_a_parameter(stage, int(row["GPUs"]) // int(row["tensor"]))
                / 1e9
                for name, stage in columns.items()
            },
        }
        for row in read_csv(FOLDER / "published_models.csv")
    ]
    return {"states": states, "models": models, "plans": [plan(stage, n) for n in RANKS for stage in STAGES]}


def bytes_a_parameter(stage: int, ranks: int) -> float:
    """The paper's formula: 2 of weights, 2 of gradients, 12 of float32 weights and moments; a stage splits one more of them."""
    optimizer, gradients, weights = (n / (ranks if stage >= at else 1) for n, at in ((12, 1), (2, 2), (2, 3)))
    return optimizer + gradients + weights


def plan(stage: int, ranks: int) -> dict[str, Any]:
    """Return what a rank holds, in bytes a parameter, and sends in a step, in elements a parameter, times N / (N − 1)."""
    spec = ParallelSpec.parse(dict(data=ranks, zero=dict(stage=stage, placement="cuda")))
    found = estimate(
        lambda: GPT(CONFIG),
        spec,
        batch_size=ranks,
        seq_len=TOKENS,
        precision="bf16",
        machine=unlimited_machine(),
        clip=False,
    )
    count, memory = found.parameters, found.memory
    sent = {"parameters": 0.0, "gradients": 0.0}
    for entry in found.traffic:
        if entry.phase in sent:
            width = 2 if entry.phase == "parameters" else 4  # gradients are summed in float32
            sent[entry.phase] += float(entry.bytes) / width / count * ranks / (ranks - 1)
    return {
        "stage": stage,
        "ranks": ranks,
        "sent": sent,
        "weights": memory.parameters / count,
        "gradients": memory.gradients / count,
        "optimizer": (memory.masters + memory.optimizer) / count,
    }
