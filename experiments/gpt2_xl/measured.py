"""One rank of ``meshfold reproduce gpt2-xl --measure N``: the three strategies, trained for real.

On GPUs with more memory, only 40 GB of each may be allocated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from experiments.measuring import measured, results, shared_cores, sizes
from experiments.report import NONE, markdown
from experiments.trained import Job, gpt_of, trained
from meshfold.models import GPT

LIMIT = 40 * 2**30
PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# GPT2-XL: strategies that ran

{ranks} ranks on {device}, {kind}; GPT with {layers} layers of {hidden}, {sequence} tokens, all blocks recomputed; median of
{steps} steps. A GPU may allocate 40 GB. Published: samples a second by DDP's 1.55 (ZeRO-3) and 1.65 (Gemini).

{table}

{verdict}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train on this rank; rank 0 writes measured.json and measured.md."""
    return measured(argv, arguments(), measure, page)


def arguments() -> argparse.ArgumentParser:
    """Sizes; on GPUs by default the table's."""
    table = [
        ("layers", 2, 48, None),
        ("hidden", 32, 1600, None),
        ("heads", 2, 25, None),
        ("sequence", 32, 1024, "tokens"),
        ("vocabulary", 128, 50304, None),
        ("few", 1, 6, "sequences of a rank under DDP"),
        ("many", 2, 40, "sequences of a rank with sharded states"),
        ("steps", 2, 5, "that count"),
    ]
    return sizes(__doc__, Path(__file__).parent, table)


def measure(options: argparse.Namespace, ranks: int, device: torch.device) -> dict[str, Any]:
    """Train under DDP with both batches, and with sharded states with the larger one."""
    config = gpt_of(options)
    job = Job(sequence=options.sequence, steps=options.steps, recompute="blocks", device=device, limit=LIMIT)
    rows = []
    for strategy, each, spec in (
        ("ddp", options.few, {}),
        ("ddp", options.many, {}),
        ("sharded", options.many, {"zero": dict(stage=3, placement="cuda")}),
    ):
        ran = trained(lambda: GPT(config), config.vocab_size, {"data": ranks, **spec}, job, batch=ranks * each)
        rows.append({"strategy": strategy, "batch": ranks * each, **ran})
    names = ("layers", "hidden", "sequence", "steps")
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    return results(options, names, ranks, device, kind, rows)


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


if __name__ == "__main__":
    sys.exit(main())
