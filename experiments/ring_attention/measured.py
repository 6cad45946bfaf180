"""One rank of ``meshfold reproduce ring-attention --measure N``: the longest sequence on ever more ranks, trained for real.

The model has layers of the shape of 3 billion parameters. Sequences are doubled until they do not fit; on a CPU, which has no such
limit, a rank's share stays at what ``--tokens`` says.
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
from experiments.trained import Job, trained
from meshfold.models import Llama, LlamaConfig

PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# Ring Attention: lengths that ran

{ranks} ranks on {device}, {kind}; Llama with {layers} layers of {hidden}, all blocks recomputed, one sequence over all GPUs;
median of {steps} steps. Published: N GPUs have N times the length.

{table}

{verdict}
"""


def measure(notes: Notes) -> None:
    """Train one sequence over all ranks, longer and longer."""
    tokens, fits = notes.options.tokens * notes.ranks, True
    while fits:
        row = notes.add(f"{tokens:,} tokens", partial(one, notes, tokens))
        tokens, fits = 2 * tokens, notes.cuda and row["fits"]


def one(notes: Notes, tokens: int) -> dict[str, Any]:
    """Train a sequence of so many tokens for a few steps."""
    options, ranks = notes.options, notes.ranks
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        ffn=options.inner,
        max_positions=tokens,
    )
    limit = options.limit * 1e9 or None
    job = Job(sequence=tokens, steps=options.steps, recompute="blocks", device=notes.device, limit=limit)
    spec: dict[str, object] = {"sequence": dict(mode="ring", size=ranks)} if ranks > 1 else {}
    return {"tokens": tokens, **trained(lambda: Llama(config), config.vocab_size, spec, job, batch=1)}


def page(found: Mapping[str, Any]) -> str:
    """measured.md."""
    rows = [
        [
            f"{row['tokens']:,}",
            *(
                [NONE if row["GB"] is None else f"{row['GB']:.1f}", f"{row['seconds']:.2f}"]
                if row["fits"]
                else [NONE, "does not fit"]
            ),
        ]
        for row in found["rows"]
    ]
    keys = ("ranks", "device", "kind", "layers", "hidden", "steps")
    table = markdown(["tokens", "GB", "seconds"], rows)
    return PAGE.format(**{key: found[key] for key in keys}, table=table, verdict=" ".join(shared_cores(found)))


MEASURED = Measured(
    file=__file__,
    about=__doc__,
    sizes=(  # Sizes; on GPUs by default two layers of the shape of 3 billion parameters, in 12 GB, so that a step takes seconds.
        ("layers", 1, 2, None),
        ("hidden", 32, 3200, None),
        ("heads", 2, 32, None),
        ("inner", 64, 8640, None),
        ("vocabulary", 128, 32_000, None),
        ("tokens", 16, 8192, "of a rank's share, to begin with"),
        ("limit", 0, 12, "GB of a GPU that may be allocated"),
        ("steps", 1, 2, "that count"),
    ),
    shown=("layers", "hidden", "steps", "limit"),
    run=measure,
    page=page,
)
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
