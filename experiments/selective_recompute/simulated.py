"""All numbers: bytes counted, and times on the clock of the experiment megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.megatron.simulated import MACHINE, chunks
from experiments.megatron.step import Run, layer_seconds, step_of
from experiments.report import read_csv
from experiments.selective_recompute.counting import HEADS, HIDDEN, RANKS, ROWS, SCHEMES, SEQUENCE, kept
from meshfold.planner import find_machine

FOLDER = Path(__file__).resolve().parent
LAYERS: dict[str, dict[str, Any]] = {
    "nothing recomputed": dict(recompute="none"),
    "sequence parallel": dict(recompute="none", sequence_parallel=True),
    "full": dict(recompute="full"),
    "selective": dict(recompute="selective"),
    "selective + sequence parallel": dict(recompute="selective", sequence_parallel=True),
}
"""Table 4's schemes."""
PRESENT: dict[str, Any] = LAYERS["selective + sequence parallel"]


def everything() -> dict[str, Any]:
    """All numbers."""
    return {
        "bytes": [{"scheme": name, "formula": formula(name), "counted": kept(**SCHEMES[name])} for name in SCHEMES],
        "layer": layers(),
        "steps": steps(),
    }


def formula(scheme: str) -> float:
    """Table 2's bytes of a layer of 22 billion parameters' model on eight ranks."""
    row = next(row for row in read_csv(FOLDER / "published_bytes.csv") if row["scheme"] == scheme)
    t = 1 if scheme == "no parallelism" else RANKS
    fixed, shared, scores = (int(row[key]) for key in ("fixed", "shared", "scores"))
    return SEQUENCE * ROWS * HIDDEN * (fixed + shared / t + scores * 5 * HEADS * SEQUENCE / (HIDDEN * t))


def layers() -> list[dict[str, Any]]:
    """Table 4: milliseconds of a layer, and what a scheme takes more than nothing recomputed."""
    rows = []
    plain = 0.0
    for row in read_csv(FOLDER / "published_layer.csv"):
        run = Run(
            layers=48,
            hidden=HIDDEN,
            heads=HEADS,
            batch=ROWS,
            rows=ROWS,
            gpus=RANKS,
            tensor=RANKS,
            **LAYERS[row["scheme"]],
        )
        forward, backward = (1e3 * seconds for seconds in layer_seconds(run, find_machine(MACHINE)))
        plain = plain or forward + backward
        published = {key: float(value) for key, value in row.items() if key != "scheme"}
        ours = {"forward": forward, "backward": backward, "combined": forward + backward}
        ours["overhead"] = ours["combined"] / plain - 1
        rows.append({"scheme": row["scheme"], "published": published, "ours": ours})
    return rows


def steps() -> list[dict[str, Any]]:
    """Table 5: seconds of a step of four models, and how much faster the second is."""
    rows = []
    for row in read_csv(FOLDER / "published_steps.csv"):
        sizes: dict[str, Any] = {
            key: int(row[key]) for key in ("layers", "hidden", "heads", "pipeline", "gpus", "batch", "rows")
        }
        split: dict[str, Any] = dict(tensor=8, chunks=chunks(sizes["layers"], sizes["pipeline"]))
        full, present = (
            step_of(Run(**sizes, **split, **scheme), find_machine(MACHINE)).seconds
            for scheme in (LAYERS["full"], PRESENT)
        )
        published = {
            "full": float(row["full_seconds"]),
            "present": float(row["present_seconds"]),
            "gain": float(row["gain"]),
        }
        rows.append(
            {
                "model": row["model"],
                "published": published,
                "ours": {"full": full, "present": present, "gain": full / present - 1},
            }
        )
    return rows
