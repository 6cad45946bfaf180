"""One rank of ``meshfold reproduce collectives --measure N``: seconds of every collective over all ranks, and their α–β."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from experiments.collectives.simulated import link_of
from experiments.measuring import publish, shared_cores, sizes, surroundings
from experiments.report import markdown
from meshfold.mesh import Mesh, start
from meshfold.planner.calibration import Effort
from meshfold.planner.calibration.messages import message_samples

PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# Collectives by α–β, run for real

{ranks} ranks on {device}; blocks of 1 KiB to {largest} KiB, fastest of {repeats}. *Unseen sizes*: the largest error of a line
through every second size for the sizes between.

{table}

{verdict}
"""
WITHIN = {"CPU": 0.25}
GPU = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on this rank; rank 0 writes measured.json and measured.md."""
    options = arguments().parse_args(argv)
    with start() as process:
        mesh = Mesh({"data": process.world_size})
        found = measure(options, mesh, torch.device(process.device))
        mesh.close()
    if process.rank == 0:
        publish(found, page, options.output)
    return 0


def arguments() -> argparse.ArgumentParser:
    """Sizes: from 1 KiB in factors of four."""
    table = [("sizes", 7, 11, "how many: the last is 4 ** (sizes - 1) KiB"), ("repeats", 5, 10, "of every time")]
    return sizes(__doc__, Path(__file__).parent, table)


def measure(options: argparse.Namespace, mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """Every kind over all ranks of a mesh with one axis."""
    group = mesh.group("data")
    blocks = tuple(1024 * 4**n for n in range(options.sizes))
    samples = message_samples(group, device, replace(Effort(), message_bytes=blocks, repeats=options.repeats))
    kinds = dict.fromkeys(sample.kind for sample in samples)
    links = [link_of(kind, [sample for sample in samples if sample.kind == kind]) for kind in kinds]
    return {
        "ranks": group.size,
        **surroundings(device, torch.float32),
        "largest": blocks[-1] // 1024,
        "repeats": options.repeats,
        "links": links,
    }


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


if __name__ == "__main__":
    sys.exit(main())
