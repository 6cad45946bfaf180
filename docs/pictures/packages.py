"""The picture of the packages: which imports which, and what is in each."""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING

from matplotlib.patches import FancyBboxPatch

from integration_tests.house import OWNERS, PACKAGES, Package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTENTS = {
    "mesh": "spec, mesh, layouts\ncollectives, random numbers\nlaunch, watchdog",
    "kernels": "Triton and numba kernels\nbeside torch references",
    "tensor_parallel": "layout algebra, modes\nsharded layers\nconversion of a model",
    "pipeline": "schedules, their check and run\nring and Ulysses attention",
    "zero_gemini": "chunks, their placement\noptimizers on shards\nNVMe",
    "checkpoint": "safetensors, rectangles\ncrash-safe folders",
    "models": "GPT, Llama\ngeneration",
    "engine": "the train step, batches, precision\ncheckpoints of a run, long runs",
    "planner": "bytes and seconds\nbefore anything runs",
    "huggingface": "models, folders\nTrainer, LoRA",
    "lightning": "a strategy",
    "colossalai": "names of\nColossal-AI",
    "meshfold": "the command meshfold: train, plan, run, bench, reproduce, convert, doctor",
}


@cache
def imported() -> dict[str, frozenset[str]]:
    """Read which siblings each package imports."""
    return {package.name: frozenset(_siblings(package)) for package in PACKAGES}


def levels() -> list[list[str]]:
    """Return the packages in rows: each stands above all that it imports."""
    known = imported()

    @cache
    def height(name: str) -> int:
        return max((height(sibling) + 1 for sibling in known[name]), default=0)

    rows: list[list[str]] = [[] for _ in range(1 + max(map(height, known)))]
    for name in known:
        rows[height(name)].append(name)
    return rows


def description() -> str:
    """Return what the picture shows, in words that change when it should."""
    edges = (f"{name}: {', '.join(sorted(below)) or '-'}" for name, below in sorted(imported().items()))
    return "\n".join([*edges, *(f"{name}= {CONTENTS[name]!r}" for name in sorted(imported()))])


def draw() -> Figure:
    """Draw one box for each package; a package imports only packages in rows below it."""
    from matplotlib.figure import Figure

    rows = levels()
    figure = Figure(figsize=(9.0, 0.2 + 1.15 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    widest = 3.0
    for row, names in enumerate(rows):
        width = widest / len(names)
        for place, name in enumerate(names):
            left, bottom = place * width, float(row)
            axes.add_patch(
                FancyBboxPatch(
                    (left + 0.03, bottom + 0.08),
                    width - 0.06,
                    0.84,
                    boxstyle="round,pad=0,rounding_size=0.05",
                    facecolor="#e8eef7",
                    edgecolor="#345",
                    linewidth=1.0,
                )
            )
            middle = left + width / 2
            axes.text(
                middle, bottom + 0.76, name, ha="center", va="center", weight="bold", size=10, color="#123"
            )
            axes.text(middle, bottom + 0.38, CONTENTS[name], ha="center", va="center", size=7.5, color="#234")
    axes.set_xlim(0, widest)
    axes.set_ylim(0, len(rows))
    axes.set_axis_off()
    return figure


def _siblings(package: Package) -> set[str]:
    found: set[str] = set()
    for path in package.modules:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshfold."):
                found.add(OWNERS[str(node.module).split(".")[1]])
    return found - {package.name}
