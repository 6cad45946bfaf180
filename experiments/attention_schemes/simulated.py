"""Both published tables on the clock, and what each scheme sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from experiments.attention_schemes.counting import PASSES, Problem, Scheme, count, parts
from experiments.report import read_csv
from experiments.toml_tables import read_tables
from meshfold.mesh import LayoutError, Mesh
from meshfold.planner import Machine, find_machine
from meshfold.sequence import traffic

FOLDER = Path(__file__).resolve().parent
RANKS = 8
LLAMA = Problem(tokens=8192 * RANKS, heads=32, kv_heads=8, head_dim=128)
SCHEMES = {
    "ring": Scheme(ring=RANKS, ulysses=1, order="contiguous"),
    "zigzag": Scheme(ring=RANKS, ulysses=1),
    "Ulysses": Scheme(ring=1, ulysses=RANKS),
    "ring + Ulysses": Scheme(ring=2, ulysses=RANKS // 2),
}
PUBLISHED = ("ring", "zigzag")
HEADS, HEAD_DIM, TOKENS = 32, 128, 131_072
"""Of the volumes; they are proportional to heads and tokens."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A table of settings.toml: a preset, and GB a second that its links send."""

    preset: str
    link_gb: float
    source: str


def everything() -> dict[str, Any]:
    """All numbers."""
    return {
        "readme": [of_readme(row) for row in read_csv(FOLDER / "published_readme.csv")],
        "degrees": [of_degrees(row) for row in read_csv(FOLDER / "published_degrees.csv")],
        "volumes": [volume(scheme) for ranks in (2, 4, 8, 16, 32) for scheme in parts(ranks)],
        "refused": [refused(ranks) for ranks in (32, 64, 128)],
    }


def machine(name: str) -> Machine:
    """Return a machine of settings.toml."""
    one = read_tables(FOLDER / "settings.toml", Setting)[name]
    return replace(find_machine(one.preset), inside=one.link_gb * 1e9)


@cache
def seconds(problem: Problem, scheme: Scheme, on: str) -> tuple[float, ...]:
    """Seconds of forward and backward."""
    counted, gpu = count(problem, scheme), machine(on)
    return tuple(counted[phase].seconds(gpu) for phase in PASSES)


def of_readme(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a row of the README: iterations a second of one GPU's even share, and of the schemes."""
    last = 1 if row["pass"] == "fwd" else 2
    ideal = sum(LLAMA.ideal(RANKS, machine(row["gpu"]), phase) for phase in PASSES[:last])
    ours = {name: 1 / sum(seconds(LLAMA, scheme, row["gpu"])[:last]) for name, scheme in SCHEMES.items()}
    published = {name: float(row[name]) for name in ("ideal", *PUBLISHED, "stripe")}
    return {"pass": row["pass"], "GPUs": row["gpu"], "published": published, "ours": {"ideal": 1 / ideal, **ours}}


def of_degrees(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a row of the chart: forward iterations a second in both orders of the ring."""
    tokens, heads, head_dim, ulysses = (int(row[key]) for key in ("tokens", "heads", "head_dim", "ulysses"))
    problem = Problem(tokens=tokens, heads=heads, kv_heads=heads, head_dim=head_dim)
    zigzag = Scheme(ring=RANKS // ulysses, ulysses=ulysses)
    ours = {
        "basic": 1 / seconds(problem, replace(zigzag, order="contiguous"), "8xA100")[0],
        "zigzag": 1 / seconds(problem, zigzag, "8xA100")[0],
    }
    return {
        "tokens": tokens,
        "heads": heads,
        "head_dim": head_dim,
        "ulysses": ulysses,
        "published": {name: float(row[name]) for name in ours},
        "ours": ours,
    }


def volume(scheme: Scheme) -> dict[str, Any]:
    """Return the elements that a rank sends, in parts of tokens × heads × head_dim, recorded and by the library's formula."""
    problem = Problem(tokens=TOKENS, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM)
    whole = 2 * TOKENS * HEADS * HEAD_DIM  # bytes
    found = count(problem, scheme)
    mesh = Mesh(scheme.axes, rank=0)
    planned = traffic(TOKENS, HEADS, HEADS, HEAD_DIM, mesh, scheme.mode)
    recorded = [found[phase].ring_bytes + found[phase].exchange_bytes for phase in PASSES]
    return {
        "ring": scheme.ring,
        "ulysses": scheme.ulysses,
        "recorded": [size / whole for size in recorded],
        "planned": [float(size) / whole for size in planned],
    }


def refused(ranks: int) -> dict[str, Any]:
    """Return whether Ulysses, and a ring of two beside it, take so many ranks with 32 heads."""

    def runs(scheme: Scheme) -> bool:
        try:
            traffic(TOKENS, HEADS, HEADS, HEAD_DIM, Mesh(scheme.axes, rank=0), scheme.mode)
        except LayoutError:
            return False
        return True

    beside = max(ranks // HEADS, 2)
    return {
        "ranks": ranks,
        "Ulysses": runs(Scheme(ring=1, ulysses=ranks)),
        "ring + Ulysses": runs(Scheme(ring=beside, ulysses=ranks // beside)),
    }
