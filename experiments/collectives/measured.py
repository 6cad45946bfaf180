"""One rank of ``meshfold reproduce collectives --measure N``: seconds of every collective over all ranks, and their α–β."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.collectives.simulated import link_of
from experiments.measuring import Measured, Notes, shared_cores
from experiments.report import markdown
from meshfold.mesh import Mesh
from meshfold.planner.calibration import Effort
from meshfold.planner.calibration.messages import KINDS, message_samples

PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# Collectives by α–β, run for real

{ranks} ranks on {device}; blocks of 1 KiB to {largest} KiB, fastest of {repeats}. *Unseen sizes*: the largest error of a line
through every second size for the sizes between.

{table}

{verdict}
"""
WITHIN = {"CPU": 0.25}
GPU = 0.1


def measure(notes: Notes) -> None:
    """Measure every kind over all ranks."""
    blocks = tuple(1024 * 4**n for n in range(notes.options.sizes))
    notes.head |= {"kind": "float32", "largest": blocks[-1] // 1024}
    effort = replace(Effort(), message_bytes=blocks, repeats=notes.options.repeats)
    with closing(Mesh({"data": notes.ranks})) as mesh:
        group = mesh.group("data")
        for kind in KINDS:
            notes.add(kind, lambda: link_of(kind, message_samples(group, notes.device, effort, [kind])))  # noqa: B023


def page(found: Mapping[str, Any]) -> str:
    """measured.md."""
    rows = [
        [
            link["kind"].replace("_", "-"),
            f"{1e6 * link['latency']:.1f}",
            f"{link['rate'] / 1e9:.2f}",
            f"{link['unseen']:.0%}",
        ]
        for link in found["links"]
    ]
    table = markdown(["collective", "α, µs", "β, GB/s", "unseen sizes"], rows)
    keys = ("ranks", "device", "largest", "repeats")
    return PAGE.format(**{key: found[key] for key in keys}, table=table, verdict=said(found))


def said(found: Mapping[str, Any]) -> str:
    """How many kinds α–β tells."""
    within = WITHIN.get(found["device"], GPU)
    good = [link for link in found["links"] if link["unseen"] <= within]
    parts = [f"Of {len(found['links'])} kinds α–β tells {len(good)} within {within:.0%} at unseen sizes."]
    return " ".join([*parts, *shared_cores(found)])


MEASURED = Measured(
    file=__file__,
    about=__doc__,
    sizes=(  # Sizes: from 1 KiB in factors of four.
        ("sizes", 7, 11, "how many: the last is 4 ** (sizes - 1) KiB"),
        ("repeats", 5, 10, "of every time"),
    ),
    shown=("repeats",),
    run=measure,
    page=page,
    key="links",
)
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
