"""Claims of FastFold, beside what was computed, counted and run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.fastfold import memory, settings
from experiments.report import Case, Cases, Claim, read_claims

CARD = memory.CARDS["A100, 40 GB"]


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    said = settings.headlines()
    theirs = found["training"]
    lengths = {row["N"]: row for row in found["lengths"]}
    runs = {row["backward"]: row for row in found["gradients"]}
    faults = {name: row for name, row in runs.items() if name != "ours"}
    one_gpu = lengths[1]["peak"]["4096"] * (said["residues on one GPU"] / 4096) ** 2
    own: Cases = {
        "four_digits": [
            Case("FastFold, hours", 67.06, theirs["FastFold"]["hours"]),
            Case("OpenFold, days", 8.395, theirs["OpenFold"]["hours"] / 24),
        ],
        "training_time": [
            Case("FastFold, hours", said["hours"], theirs["FastFold"]["hours"]),
            *(Case(f"{name}, days", row["published days"], row["hours"] / 24) for name, row in theirs.items()),
            *(
                Case(f"{name}, device hours", row["published device hours"], row["device hours"])
                for name, row in theirs.items()
            ),
        ],
        "bytes_as_planned": [
            Case(f"{_where(row)}, {part}", row["dap planned"][part], sent)
            for row in found["traffic"]
            for part, sent in row["dap"].items()
        ],
        "less_than_tensor_parallelism": [
            Case(_where(row), sum(row["tensor"].values()), sum(row["dap"].values())) for row in found["traffic"]
        ],
        "less_than_fastfold": [
            Case(_where(row), said[f"elements over {row['N']}"], row["dap"]["forward"])
            for row in found["traffic"]
            if row["phase"] == "initial training"
        ],
        "async_not_slower": [Case(_where(row), row["sync"], row["async"]) for row in found["overlap"] if row["N"] > 1],
        "memory_over_ranks": [
            Case(_where(row), _one(found["kept"], row["phase"])["bytes"] / row["N"], row["bytes"])
            for row in found["kept"]
            if row["N"] > 1
        ],
        "longest_by_ranks": [
            Case(f"N = {n}, {card}", lengths[1]["longest"][card] * n**0.5, residues)
            for n, row in lengths.items()
            for card, residues in row["longest"].items()
            if n > 1
        ],
        "published_lengths_fit": [
            Case(f"{residues} residues, N = {n}", CARD, peak)
            for n in (4, 8)
            for residues, peak in lengths[n]["peak"].items()
        ],
        "one_gpu_runs_out": [Case("bytes of the card, of those needed", lengths[1]["peak"]["4096"], CARD)],
        "residues_on_one_gpu": [Case("bytes", said["bytes of these"], one_gpu)],
        "gradients_of_ours": [Case("wrong gradients", 0, runs["ours"]["wrong"])],
        "outputs_hide_it": [Case(name, 0, row["outputs"]) for name, row in faults.items()],
        "wrong_gradients": [
            Case(name, said["wrong gradients"] / said["gradients"], row["wrong"] / row["gradients"])
            for name, row in faults.items()
        ],
        "worst_gradient": [Case(name, said["worst error"], row["worst"]) for name, row in faults.items()],
        "efficiency_at_512": (),
    }
    many = [row for row in found["overlap"] if row["N"] > 1]
    saved = [(row["sync"] - row["async"]) / row["sync"] for row in many]
    hidden = [(row["sync"] - row["async"]) / row["link"] for row in many]
    shares = [case.ours / case.published for case in own["less_than_tensor_parallelism"]]
    return read_claims(
        Path(__file__).parent,
        own,
        share=max(shares),
        least=min(saved),
        most=max(saved),
        hidden=min(hidden),
        hidden_most=max(hidden),
        one_gpu=one_gpu / 1e9,
        slice_=runs["own slice"]["wrong"],
        order=runs["other order"]["wrong"],
        of=runs["ours"]["gradients"],
        worst_slice=runs["own slice"]["worst"],
        worst_order=runs["other order"]["worst"],
    )


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['phase']}, N = {row['N']}"


def _one(rows: list[Mapping[str, Any]], phase: str) -> Mapping[str, Any]:
    return next(row for row in rows if row["phase"] == phase and row["N"] == 1)
