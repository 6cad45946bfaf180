"""One rank of ``meshfold reproduce megatron-2019 --measure N``: weak scaling of tensor parallelism, trained for real.

Rows are those of table 1 whose ranks divide N; the other ranks train the same model beside it, on sequences of their own. Of two
micro-batches of a step, the first is forward and backward alone, as by one group; the second also has the sum of gradients over all
groups and the optimizer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from experiments.measuring import ON_CPU, Measured, Notes
from experiments.megatron.step import Run
from experiments.megatron_2019.simulated import FOLDER
from experiments.report import markdown, read_csv
from meshfold.engine import Engine
from meshfold.mesh import all_reduce, barrier, record
from meshfold.models import GPT, GPTConfig

PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# Megatron-LM in 2019: weak scaling that ran

{ranks} ranks on {device}, {kind}; {sequence} tokens, {batch} sequences a group, all blocks recomputed; median of {steps}. *GPUs*:
of tensor parallelism. *Alone*: forward and backward of a group. *With data*: on all ranks, with the sum of gradients and the
optimizer. Per cent of the TFLOP/s of one GPU alone; published for V100s, *with data* on 64 groups. *GB*: that a rank sends.

{table}

{verdict}
"""


def measure(notes: Notes) -> None:
    """Train the models of table 1 whose ranks divide those there are."""
    for row in read_csv(FOLDER / "published.csv"):
        tensor = int(row["tensor"])
        if notes.ranks % tensor == 0:
            notes.add(f"{row['billions']} billion on {tensor}", partial(one, notes, row))


def one(notes: Notes, row: Mapping[str, str]) -> dict[str, Any]:
    """Train a row's model under tensor and data parallelism on all ranks."""
    o, tensor, device = notes.options, int(row["tensor"]), notes.device
    layers, hidden, heads = int(row["layers"]) // o.shallow, int(row["hidden"]) // o.narrow, int(row["heads"])
    groups = notes.ranks // tensor
    config = GPTConfig(vocab_size=o.vocabulary, hidden=hidden, layers=layers, heads=heads, max_positions=o.sequence)
    tokens = torch.randint(o.vocabulary, (groups * o.batch, o.sequence), generator=torch.Generator().manual_seed(0))
    with Engine(
        lambda: GPT(config),
        parallel={"data": groups, "tensor": dict(mode="1d", size=tensor)},
        optimizer=dict(name="adamw", lr=1e-4),
        precision="bf16" if notes.cuda else "fp32",
        recompute="blocks",
        gradient_accumulation=2,
        device=device,
    ) as engine:
        rows = engine.shard_batch({"input_ids": tokens, "labels": tokens})
        world = engine.mesh.group(*engine.mesh.names)
        times: tuple[list[float], list[float]] = ([], [])
        losses, sent = [], []
        for _ in times:  # the step that does not count
            with record() as log:
                losses.append(engine.train_step(rows))
            sent.append(float(sum(entry.bytes for entry in log.entries)))
        for _ in range(o.steps):
            for some in times:
                barrier(world, device)
                began = time.perf_counter()
                losses.append(engine.train_step(rows))
                if notes.cuda:
                    torch.cuda.synchronize(device)
                some.append(time.perf_counter() - began)
        middles = torch.tensor([statistics.median(some) for some in times], dtype=torch.float64, device=device)
        alone, whole = all_reduce(middles, world, op="max").tolist()
    run = Run(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=o.vocabulary,
        sequence=o.sequence,
        batch=o.batch,
        rows=o.batch,
        gpus=tensor,
        tensor=tensor,
    )
    work = run.flop(recomputed=True) / tensor / 1e12
    return {
        "billions": float(row["billions"]),
        "tensor": tensor,
        "data": groups,
        "published": {key: float(row[f"{key}_percent"]) for key in ("tensor", "data")},
        "seconds": {"tensor": alone, "data": whole},
        "TFLOP/s": {"tensor": work / alone, "data": work / whole},
        "sent": {"tensor": sent[0], "data": sent[1]},
        "losses": [losses[0], losses[-1]],
    }


def shares(found: Mapping[str, Any], key: str) -> list[float]:
    """Per cent of one GPU's speed, by row."""
    first = found["rows"][0]["TFLOP/s"]["tensor"]
    return [100 * row["TFLOP/s"][key] / first for row in found["rows"]]


def page(found: Mapping[str, Any]) -> str:
    """measured.md."""
    columns = zip(found["rows"], shares(found, "tensor"), shares(found, "data"), strict=True)
    rows = [
        [
            f"{row['billions']:g}",
            str(row["tensor"]),
            f"{1e3 * row['seconds']['tensor']:.1f}",
            f"{row['sent']['tensor'] / 1e9:.2f}",
            f"{row['TFLOP/s']['tensor']:.1f}",
            f"{row['published']['tensor']:g}",
            f"{alone:.1f}",
            str(row["tensor"] * row["data"]),
            f"{1e3 * row['seconds']['data']:.1f}",
            f"{row['sent']['data'] / 1e9:.2f}",
            f"{row['published']['data']:g}",
            f"{whole:.1f}",
        ]
        for row, alone, whole in columns
    ]
    head = ["billion", "GPUs", "ms, alone", "GB", "TFLOP/s", "%", "ours", "with data", "ms", "GB", "%", "ours"]
    keys = ("ranks", "device", "kind", "sequence", "batch", "steps")
    return PAGE.format(**{key: found[key] for key in keys}, table=markdown(head, rows), verdict=said(found))


def said(found: Mapping[str, Any]) -> str:
    """Return what the numbers say of the published efficiencies, by their direction: the GPUs are others."""
    if found["device"] == "CPU":
        return ON_CPU
    alone, rows = shares(found, "tensor"), found["rows"]
    parts = []
    if len(rows) > 1:
        falls = all(after < before for before, after in pairwise(alone))
        published = ", ".join(f"{row['published']['tensor']:g}" for row in rows)
        ours = ", ".join(f"{share:.0f}" for share in alone)
        named = ", ".join(str(row["tensor"]) for row in rows)
        direction = "falls, as published" if falls else "does not fall from row to row, as the published one does"
        parts.append(f"Efficiency {direction}: {ours} % with {named} GPUs (published {published} %).")
        parts.append("These GPUs compute faster than V100s by more than their links are faster, so ours may be lower.")
    return " ".join(parts)


MEASURED = Measured(
    file=__file__,
    about=__doc__,
    sizes=(  # Sizes; on GPUs by default those of table 1.
        ("narrow", 24, 1, "divides the published number of channels"),
        ("shallow", 40, 1, "divides the published number of layers"),
        ("sequence", 16, 1024, "tokens"),
        ("vocabulary", 128, 51_200, None),
        ("batch", 2, 8, "sequences of a group"),
        ("steps", 2, 5, "that count; one more runs before them"),
    ),
    shown=("narrow", "shallow", "sequence", "batch", "steps"),
    run=measure,
    page=page,
)
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
