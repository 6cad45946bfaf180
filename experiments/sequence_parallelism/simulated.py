"""All numbers: counts, runs on a few ranks, and the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from experiments.sequence_parallelism import counting, exact, plan
from experiments.sequence_parallelism.bert import LARGE


def everything() -> dict[str, Any]:
    """All numbers; runs with values start four CPU ranks."""
    rows = plan.published()
    found = plan.fit(rows)
    return {
        "volumes": counting.volumes(),
        "blocks": counting.blocks(),
        "kept": counting.activations(rows),
        "work": list(counting.causal_work()),
        "runs": exact.everything(),
        "scores": a_score(rows),
        "fit": {**asdict(found), "a_parameter": found.a_parameter, "a_layer": found.a_layer},
        "memory": plan.memory(rows, found),
        "clock": plan.clock(rows),
        "sizes": plan.sizes(found),
    }


def a_score(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bytes that a stage holds for each of BZL² / N scores, from neighbouring rows with as many tokens a rank."""
    weak = [row for row in rows if row["batch"] == rows[-1]["batch"]]
    weak = [row for row in weak if row["length"] == 256 * row["N"]]
    found = []
    for less, more in pairwise(weak):
        scores = [row["batch"] * LARGE.heads * row["length"] ** 2 / row["N"] for row in (less, more)]
        found.append(
            {
                "N": [less["N"], more["N"]],
                "bytes": (more["sp_mb"] - less["sp_mb"]) * plan.MB / (scores[1] - scores[0]),
            }
        )
    return found
