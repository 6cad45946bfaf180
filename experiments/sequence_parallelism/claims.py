"""What the paper says, beside what was counted, run and planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.report import Case, Cases, Claim, read_claims, read_csv
from experiments.sequence_parallelism.claims_table4 import memory, sizes, throughput
from experiments.sequence_parallelism.counting import RING, RING_SELF, TENSOR
from experiments.sequence_parallelism.plan import FOLDER

Row = Mapping[str, Any]


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    ranks, batch, _ = found["clock"]["fitted"]
    cases: Cases = {
        **_volumes(found),
        **_blocks(found),
        **memory(found),
        **throughput(found),
        **sizes(found),
        **_runs(found),
    }
    return read_claims(FOLDER, cases, bandwidth=found["clock"]["bandwidth"] / 1e9, ranks=ranks, batch=batch)


def formulas() -> dict[str, str]:
    """The published formulas in Python's notation, by id."""
    return {row["id"]: row["formula"] for row in read_csv(FOLDER / "published_formulas.csv")}


def value(formula: str, row: Row) -> float:
    """A formula at the sizes of a row."""
    names = {name: row[name] for name in "NBLHZ"}
    return float(eval(formula, {"__builtins__": {}}, {**names, "A": row["H"] // row["Z"]}))


def _volumes(found: Mapping[str, Any]) -> Cases:
    printed = formulas()
    rows: list[Row] = found["volumes"]

    def cases(scheme: str, name: str) -> list[Case]:
        return [
            Case(f"{row['model']}, N {row['N']}, {phase}", value(printed[f"{name}-{phase}"], row), row[phase])
            for row in rows
            if row["scheme"] == scheme
            for phase in ("forward", "backward")
        ]

    sums = {(row["model"], row["N"], row["scheme"]): row["forward"] + row["backward"] for row in rows}
    return {
        "ring_self_attention_volume": cases(RING_SELF, "rsa"),
        "tensor_parallel_volume": cases(TENSOR, "tp"),
        "equal_volume": [
            Case(f"{model}, N {n}", 1.0, sums[model, n, RING_SELF] / sums[model, n, TENSOR])
            for model, n, scheme in sums
            if scheme == TENSOR and (model, n, RING_SELF) in sums
        ],
        "our_ring_volume": [
            Case(
                f"{row['model']}, N {row['N']}, {phase}",
                times * row["B"] * row["L"] / row["N"] * row["H"],
                row[phase],
            )
            for row in rows
            if row["scheme"] == RING
            for phase, times in (("forward", 2 * row["N"] - 2), ("backward", 4 * row["N"] - 2))
        ],
    }


def _blocks(found: Mapping[str, Any]) -> Cases:
    printed = formulas()
    scheme_of = {TENSOR: "tp", RING_SELF: "sp"}
    blocks = {(row["N"], row["B"], row["scheme"]): row for row in found["blocks"]}
    crossings = []
    for n, batch, scheme in blocks:
        if scheme == TENSOR:
            tp, sp = blocks[n, batch, TENSOR], blocks[n, batch, RING_SELF]
            tokens = batch * tp["L"]
            for part, bound in (("mlp", 32 * tp["H"]), ("attention", 16 * tp["H"])):
                crossings.append(Case(f"{part}, N {n}, BL {tokens}", float(tokens > bound), float(sp[part] < tp[part])))
    return {
        "memory_formulas": [
            Case(f"{part}, {name}, N {n}, B {batch}", value(printed[f"{part}-{name}"], row), row[part])
            for (n, batch, scheme), row in blocks.items()
            for name in [scheme_of[scheme]]
            for part in ("mlp", "attention")
        ],
        "memory_crossover": crossings,
    }


def _runs(found: Mapping[str, Any]) -> Cases:
    rows: list[Row] = found["runs"]
    rings = [row for row in rows if row["scheme"] != TENSOR]
    theirs: Sequence[Row] = read_csv(FOLDER / "published_gradients.csv")
    four = next(row for row in rows if row["scheme"] == RING_SELF and row["N"] == 4)
    return {
        "output_and_gradients_of_one_process": [
            Case(f"{row['scheme']}, N {row['N']}, {what}", 0.0, row[f"{what} error"])
            for row in rows
            for what in ("output", "gradient")
        ],
        "ring_gradients": [
            Case(f"{row['scheme']}, N {row['N']}, {name}", 1.0, row[f"{name} ratio"])
            for row in rings
            for name in ("dQ", "dK", "dV")
        ],
        "counts_on_real_ranks": [
            Case(f"{row['scheme']}, N {row['N']}, {what}", row[f"planned {what}"], row[what])
            for row in rows
            for what in ("sent", "kept")
        ],
        "colossalai_gradients": [
            Case(
                f"{row['operator']}, {row['gradient']}",
                float(row["ratio"]),
                four[f"{row['gradient']} ratio"],
            )
            for row in theirs
        ],
    }
