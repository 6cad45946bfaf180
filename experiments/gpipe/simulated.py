"""GPipe on a clock: idle time, and throughput with equal stages and with one that is heavier."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.report import read_csv
from meshfold.pipeline import schedule, simulate

PUBLISHED = Path(__file__).with_name("published.csv")
RANKS = (2, 4, 8, 16)
MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)
FITTED = 32  # the number of micro-batches at which the heaviest stage is fitted
UNEVEN = "AmoebaNet-D"


def everything(ranks: Iterable[int] = RANKS) -> dict[str, Any]:
    """All numbers."""
    bubbles = [
        {"K": k, "M": m, "simulated": simulate(schedule("gpipe", ranks=k, microbatches=m)).bubble}
        for k in ranks
        for m in MICROBATCHES
    ]
    rows: list[dict[str, Any]] = [
        {
            "table": row["table"],
            "model": row["model"],
            "K": int(row["K"]),
            "M": int(row["M"]),
            "published": float(row["normalized_throughput"]),
        }
        for row in read_csv(PUBLISHED)
    ]
    heaviest = {
        row["K"]: heaviest_stage(row["K"], row["M"], row["published"])
        for row in rows
        if (row["table"], row["model"], row["M"]) == ("T2", UNEVEN, FITTED)
    }
    for row in rows:
        k, m = row["K"], row["M"]
        base = 1.0 if row["table"] == "T2" else throughput(2, m)
        row["equal stages"] = throughput(k, m) / base
        if row["model"] == UNEVEN:
            base = 1.0 if row["table"] == "T2" else throughput(2, m, heaviest[2])
            row["a heavier stage"] = throughput(k, m, heaviest[k]) / base
    return {"bubbles": bubbles, "throughput": rows, "heaviest": {str(k): x for k, x in heaviest.items()}}


def throughput(ranks: int, microbatches: int, heaviest: float = 1.0) -> float:
    """Batches in the time that one batch takes without parallelism, which is what M = 1 is.

    Args:
        ranks: K.
        microbatches: M, of a batch whose size stays.
        heaviest: time of the stage in the middle, in that of a mean one; the others share the rest.
    """
    share = 1 / (3 * ranks * microbatches)  # F, B and W of a mean stage for one micro-batch, each
    rest = share * (ranks - heaviest) / (ranks - 1)
    times = [share * heaviest if stage == ranks // 2 else rest for stage in range(ranks)]
    return 1 / simulate(schedule("gpipe", ranks=ranks, microbatches=microbatches), times, times, times).makespan


def heaviest_stage(ranks: int, microbatches: int, seen: float) -> float:
    """How heavy one stage must be for a throughput that was seen: a step takes sum + (M - 1) max of the stages' times."""
    return (microbatches / seen - 1) * ranks / (microbatches - 1)
