"""One rank of ``meshfold reproduce gpt2-xl --measure N``: the three strategies, trained for real.

On GPUs with more memory, only 40 GB of each may be allocated.
"""

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

LIMIT = 40 * 2**30
STRATEGIES: dict[str, dict[str, object]] = {"ddp": {}, "sharded": {"zero": dict(stage=3, placement="cuda")}}
PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# GPT2-XL: strategies that ran

{ranks} ranks on {device}, {kind}; GPT with {layers} layers of {hidden}, {sequence} tokens, all blocks recomputed; median of
{steps} steps. A GPU may allocate 40 GB. Published: samples a second by DDP's 1.55 (ZeRO-3) and 1.65 (Gemini).

{table}

{verdict}
"""


def measure(notes: Notes) -> None:
    """Train under DDP with both batches, and with sharded states with the larger one."""
    few, many = (notes.ranks * each for each in (notes.options.few, notes.options.many))
    for strategy, batch in (("ddp", few), ("ddp", many), ("sharded", many)):
        notes.add(f"{strategy}, {batch} sequences", partial(one, notes, strategy, batch))


def one(notes: Notes, strategy: str, batch: int) -> dict[str, Any]:
    """Train with so many sequences of all ranks."""
    options, config = notes.options, gpt_of(notes.options)
    job = Job(sequence=options.sequence, steps=options.steps, recompute="blocks", device=notes.device, limit=LIMIT)
    spec = {"data": notes.ranks, **STRATEGIES[strategy]}
    ran = trained(lambda: GPT(config), config.vocab_size, spec, job, batch=batch)
    return {"strategy": strategy, "batch": batch, **ran}


def page(found: Mapping[str, Any]) -> str:
    """measured.md."""
    first = found["rows"][0]
    rows = [
        [
            row["strategy"],
            str(row["batch"]),
            *(
                [
                    NONE if row["GB"] is None else f"{row['GB']:.1f}",
                    f"{row['samples/s']:.2f}",
                    f"{row['samples/s'] / first['samples/s']:.2f}",
                ]
                if row["fits"] and first["fits"]
                else [NONE, "does not fit", NONE]
            ),
        ]
        for row in found["rows"]
    ]
    keys = ("ranks", "device", "kind", "layers", "hidden", "sequence", "steps")
    table = markdown(["strategy", "sequences", "GB", "samples/s", "by DDP's"], rows)
    return PAGE.format(**{key: found[key] for key in keys}, table=table, verdict=" ".join(shared_cores(found)))


MEASURED = Measured(
    file=__file__,
    about=__doc__,
    sizes=(  # Sizes; on GPUs by default the table's.
        ("layers", 2, 48, None),
        ("hidden", 32, 1600, None),
        ("heads", 2, 25, None),
        ("sequence", 32, 1024, "tokens"),
        ("vocabulary", 128, 50304, None),
        ("few", 1, 6, "sequences of a rank under DDP"),
        ("many", 2, 40, "sequences of a rank with sharded states"),
        ("steps", 2, 5, "that count"),
    ),
    shown=("layers", "hidden", "sequence", "steps"),
    run=measure,
    page=page,
)
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
