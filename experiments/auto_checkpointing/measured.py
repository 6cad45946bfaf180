"""One rank of ``meshfold reproduce auto-checkpointing --measure N``: GPT2-medium under budgets, trained for real."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.measuring import Measured, Notes, shared_cores
from experiments.report import NONE, markdown
from experiments.trained import Job, gpt_of, trained
from meshfold.models import GPT

BUDGETS = (53, 37, 24, 11)
PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# Automatic recomputation that ran

{ranks} ranks on {device}, {kind}; GPT with {layers} layers of {hidden}, {batch} sequences of {sequence} tokens a rank,
`recompute="auto"` within the budget; median of {steps} steps. Published: 1.25 times as long within 11 GB as within 53. A CPU has no
budget.

{table}

{verdict}
"""


def measure(notes: Notes) -> None:
    """Train within each budget; on a CPU once, without any."""
    for budget in BUDGETS if notes.cuda else BUDGETS[:1]:
        notes.add(f"{budget} GB", partial(one, notes, budget))


def one(notes: Notes, budget: int) -> dict[str, Any]:
    """Train within a budget in GB; a CPU has none."""
    options, config = notes.options, gpt_of(notes.options)
    zero: dict[str, object] = dict(stage=3, placement="auto")
    if notes.cuda:
        zero["gpu_memory_limit"] = int(budget * 1e9)
    job = Job(sequence=options.sequence, steps=options.steps, recompute="auto", device=notes.device)
    batch, spec = notes.ranks * options.batch, {"data": notes.ranks, "zero": zero}
    return {"budget": budget, **trained(lambda: GPT(config), config.vocab_size, spec, job, batch=batch)}


def page(found: Mapping[str, Any]) -> str:
    """measured.md."""
    first = found["rows"][0]
    rows = [
        [
            str(row["budget"]),
            *(
                [
                    NONE if row["GB"] is None else f"{row['GB']:.1f}",
                    f"{row['seconds']:.3f}",
                    f"{row['seconds'] / first['seconds']:.2f}",
                ]
                if row["fits"] and first["fits"]
                else [NONE, "does not fit", NONE]
            ),
        ]
        for row in found["rows"]
    ]
    keys = ("ranks", "device", "kind", "layers", "hidden", "batch", "sequence", "steps")
    table = markdown(["budget, GB", "GB", "seconds", "by the first"], rows)
    return PAGE.format(**{key: found[key] for key in keys}, table=table, verdict=" ".join(shared_cores(found)))


MEASURED = Measured(
    file=__file__,
    about=__doc__,
    sizes=(  # Sizes; on GPUs by default the chart's model with as many sequences as the plan finds for 53 GB.
        ("layers", 1, 24, None),
        ("hidden", 32, 1024, None),
        ("heads", 2, 16, None),
        ("sequence", 16, 1024, "tokens"),
        ("vocabulary", 128, 50_304, None),
        ("batch", 1, 52, "sequences of a rank"),
        ("steps", 1, 5, "that count"),
    ),
    shown=("layers", "hidden", "sequence", "batch", "steps"),
    run=measure,
    page=page,
)
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
