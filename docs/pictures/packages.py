"""The picture of the packages: which imports which, and what is in each."""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING

from matplotlib.patches import FancyBboxPatch

from integration_tests.house import OWNERS, PACKAGES, Package, statements

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTENTS = {
    "mesh": "spec, mesh, layouts\ncollectives, random numbers\nlaunch, watchdog",
    "kernels": "Triton and numba kernels\nbeside torch references",
    "optimizers": "LAMB, LARS, Lion, CAME\nAdafactor, Muon, GaLore",
    "experts": "routers, balance\ndispatch over ranks",
    "tensor_parallel": "layout algebra, modes\nsharded layers\nconversion of a model",
    "pipeline": "schedules, their check and run\nring and Ulysses attention",
    "zero_gemini": "chunks, their placement\noptimizers on shards\nNVMe",
    "checkpoint": "safetensors, rectangles\ncrash-safe folders",
    "models": "GPT, Llama\ngeneration",
    "folding": "Evoformer, Pairformer\naxial layouts",
    "inference": "pages of keys and values\nbatching, sampling",
    "engine": "the train step, batches, precision\ncheckpoints of a run, long runs",
    "planner": "bytes and seconds\nbefore anything runs",
    "huggingface": "models, folders\nTrainer, LoRA",
    "align": "losses of preferences\nand of own samples",
    "lightning": "a strategy",
    "colossalai": "names of\nColossal-AI",
    "meshfold": "the command meshfold: train, plan, run,\nbench, reproduce, convert, doctor",
}


BESIDE = 2
"""Boxes beside each other."""


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
    """Draw one box for each package; a package imports only packages in rows below it.

    The picture is as wide as a phone. So a row of many packages stands on several lines, which are close to each other.
    """
    from matplotlib.figure import Figure

    boxes, top = [], 0.0
    for names in levels():
        for first in range(0, len(names), BESIDE):
            line = names[first : first + BESIDE]
            boxes += [(name, number / len(line), top, 1 / len(line)) for number, name in enumerate(line)]
            top += 0.9
        top += 0.2
    figure = Figure(figsize=(4.9, 0.9 * top), layout="constrained", facecolor="none")
    axes = figure.add_subplot()
    for name, left, bottom, width in boxes:
        axes.add_patch(
            FancyBboxPatch(
                (left + 0.01, bottom),
                width - 0.02,
                0.84,
                boxstyle="round,pad=0,rounding_size=0.02",
                mutation_aspect=5,  # a unit across is about five times as long as a unit up
                facecolor="#e8eef7",
                edgecolor="#6a86a8",
                linewidth=1.0,
            )
        )
        middle = left + width / 2
        axes.text(middle, bottom + 0.7, name, ha="center", va="center", weight="bold", size=10, color="#123")
        axes.text(middle, bottom + 0.33, CONTENTS[name], ha="center", va="center", size=8.5, color="#234")
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.05, top - 0.2)
    axes.set_axis_off()
    return figure


def _siblings(package: Package) -> set[str]:
    found: set[str] = set()
    for path in package.modules:
        for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshfold."):
                found.add(OWNERS[str(node.module).split(".")[1]])
    return found - {package.name}
