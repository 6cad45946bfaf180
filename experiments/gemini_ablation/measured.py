"""One rank of ``meshfold reproduce gemini-ablation --measure N``: placements of a GPT's parameters and states, trained for real."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.gemini_ablation.simulated import PLACEMENTS
from experiments.measuring import Measured, Notes, shared_cores
from experiments.report import NONE, markdown
from experiments.trained import Job, gpt_of, trained
from meshfold.models import GPT

PLANNED = "planned"
PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# Placements that ran

{ranks} ranks on {device}, {kind}; GPT with {layers} layers of {hidden}, {batch} sequences of {sequence} tokens a rank, all blocks
recomputed; median of {steps} steps. *{planned}*: the planner's choice within {limit} GB of a GPU.

{table}

{verdict}
"""


def measure(notes: Notes) -> None:
    """Train under every placement, with everything on the host first."""
    for name in [*reversed(PLACEMENTS), PLANNED]:
        notes.add(name, partial(one, notes, name))


def one(notes: Notes, name: str) -> dict[str, Any]:
    """Train under a placement."""
    options, config = notes.options, gpt_of(notes.options)
    zero: dict[str, object] = dict(PLACEMENTS.get(name, dict(placement="auto")), stage=3)
    if notes.cuda and name == PLANNED:
        zero["gpu_memory_limit"] = int(options.limit * 1e9)
    job = Job(sequence=options.sequence, steps=options.steps, recompute="blocks", device=notes.device)
    batch, spec = notes.ranks * options.batch, {"data": notes.ranks, "zero": zero}
    return {"placement": name, **trained(lambda: GPT(config), config.vocab_size, spec, job, batch=batch)}


def page(found: Mapping[str, Any]) -> str:
    """measured.md."""
    slowest = max((row["seconds"] for row in found["rows"] if row["fits"]), default=0.0)
    rows = [
        [
            row["placement"],
            *(
                [
                    NONE if row["GB"] is None else f"{row['GB']:.1f}",
                    f"{row['seconds']:.3f}",
                    f"{slowest / row['seconds']:.2f}",
                    f"{row['loss']:.4f}",
                ]
                if row["fits"]
                else [NONE, "does not fit", NONE, NONE]
            ),
        ]
        for row in found["rows"]
    ]
    keys = ("ranks", "device", "kind", "layers", "hidden", "batch", "sequence", "steps", "limit")
    table = markdown(["placement", "GB", "seconds", "times as fast", "loss"], rows)
    return PAGE.format(
        **{key: found[key] for key in keys}, planned=PLANNED, table=table, verdict=" ".join(shared_cores(found))
    )


MEASURED = Measured(
    file=__file__,
    about=__doc__,
    sizes=(  # On GPUs by default Elixir's model of a billion parameters.
        ("layers", 1, 32, None),
        ("hidden", 32, 1536, None),
        ("heads", 2, 24, None),
        ("sequence", 16, 1024, "tokens"),
        ("vocabulary", 128, 50_304, None),
        ("batch", 1, 4, "sequences of a rank"),
        ("limit", 1, 10, "GB of a GPU that the planned placement may use"),
        ("steps", 1, 3, "that count"),
    ),
    shown=("layers", "hidden", "sequence", "batch", "limit", "steps"),
    run=measure,
    page=page,
)
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
