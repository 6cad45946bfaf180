"""Plans of the charts' models on the first testbed: with planned placement, and with everything on the host.

A step of a model is traced once for one GPU and once for eight; the rest are plans within the memory of the testbed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.planned import Node, Size, limits_of, workload_of
from experiments.report import read_csv
from experiments.toml_tables import read_tables
from meshfold.zero_gemini import MemoryPlanError, search_chunk_size
from meshfold.zero_gemini.planner import cpu, plan

FOLDER = Path(__file__).resolve().parent
ROWS, SEQUENCE = 8, 1024
"""Sequences of a GPU: the charts show the best of several batches and name none."""
TRIED = {1: (4, 8, 12, 15, 18), 8: (8, 12, 15, 18, 20)}
"""Billions of parameters, by GPUs."""
PLACEMENTS = {"planned": plan, "host": cpu}
SEARCHED = 12
"""Billions of the model whose chunks are searched for."""


def everything() -> dict[str, Any]:
    """All numbers."""
    rows = [row for gpus, chosen in TRIED.items() for size in chosen for row in planned(sizes()[size], size, gpus)]
    return {"rows": rows, "published": published(), "waste": waste(sizes()[SEARCHED])}


def published() -> list[dict[str, Any]]:
    """Return the charts' labels; None where a chart has none."""
    return [
        {
            "testbed": row["testbed"],
            "system": row["system"],
            "gpus": int(row["gpus"]),
            "billions": int(row["billions"]),
            "TFLOPS": float(row["TFLOPS"]) if row["TFLOPS"] else None,
        }
        for row in read_csv(FOLDER / "published.csv")
    ]


def sizes() -> Mapping[int, Size]:
    """Return the models by billions of parameters."""
    return {int(row["billions"]): Size.of(row) for row in read_csv(FOLDER / "sizes.csv")}


def planned(size: Size, billions: int, gpus: int, rows: int = ROWS) -> list[dict[str, Any]]:
    """Return a row for each placement: whether a step fits, and if it does GB and TFLOP/s of all GPUs.

    FLOP are counted as these papers do: 8 a parameter and token.
    """
    machine = read_tables(FOLDER / "settings.toml", Node)["v100"].machine()
    workload, rates = workload_of(size.builder, gpus, machine, batch=rows * gpus, sequence=SEQUENCE)
    found = []
    for placement, policy in PLACEMENTS.items():
        row: dict[str, Any] = {"gpus": gpus, "billions": billions, "placement": placement}
        try:
            made = policy(workload, rates, limits_of(machine))
        except MemoryPlanError:
            found.append({**row, "fits": False})
            continue
        flop = 8 * sum(chunk.gathered_elems for chunk in workload.chunks) * rows * SEQUENCE * gpus
        found.append(
            {
                **row,
                "fits": True,
                "GB": made.peak_gpu_bytes / 1e9,
                "host GB": made.peak_host_bytes / 1e9,
                "seconds": made.seconds,
                "TFLOPS": flop / made.seconds / 1e12,
            }
        )
    return found


def waste(size: Size) -> float:
    """Return the share of a model's chunks, of the size that the search finds for 8 ranks, that no parameter fills."""
    with torch.device("meta"):
        model = size.build()
    return search_chunk_size(model, shards=8).waste_share
