"""Table 4 and the headlines: memory, tokens per second, and what fits, beside what was counted and planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.report import Case, Cases, read_csv
from experiments.sequence_parallelism.bert import LARGE
from experiments.sequence_parallelism.counting import RING_SELF, STAGE_LAYERS, TENSOR
from experiments.sequence_parallelism.plan import CARD, CONTEXT, FOLDER, MB, SCORE, Fit, published

Row = Mapping[str, Any]


def label(row: Row) -> str:
    """A row of table 4, in words."""
    return f"N {row['N']}, batch {row['batch']}, {row['length']} tokens"


def memory(found: Mapping[str, Any]) -> Cases:
    """Table 4's memory."""
    rows = published()
    planned = {(row["N"], row["length"], row["batch"]): row for row in found["memory"]}

    def mine(row: Row, column: str) -> float:
        return float(planned[row["N"], row["length"], row["batch"]][column])

    fitted = Fit(fixed=found["fit"]["fixed"], extra=found["fit"]["extra"])
    counted = {(row["N"], row["length"], row["batch"]): row for row in found["kept"]}
    return {
        "bytes_per_score": [
            Case(f"N {one['N'][0]} to {one['N'][1]}", one["bytes"], float(SCORE * STAGE_LAYERS))
            for one in found["scores"]
        ],
        "table_4_memory_of_sequence_parallelism": [
            Case(label(row), row["sp_mb"], mine(row, "sp_mb")) for row in rows if row["N"] > 1
        ],
        "table_4_memory_of_tensor_parallelism": [
            Case(label(row), row["tp_mb"], mine(row, "tp_mb")) for row in rows if row["tp_mb"] is not None
        ],
        "out_of_memory": [
            Case(
                f"{column}, {label(row)}",
                float(row[column] is None),
                float(mine(row, column) * MB > CARD - CONTEXT),
            )
            for row in rows
            for column in ("tp_mb", "sp_mb")
        ],
        "flat_memory_in_the_batch": [
            Case(
                label(row),
                row["sp_mb"] / rows[0]["sp_mb"],
                as_kept(row, RING_SELF, counted, fitted) / as_kept(rows[0], RING_SELF, counted, fitted),
            )
            for row in rows
            if row["length"] == rows[0]["length"] and 64 * row["N"] == row["batch"] and row["N"] > 1
        ],
        "share_of_tensor_parallelism_memory": [
            Case(
                label(row),
                row["sp_mb"] / row["tp_mb"],
                as_kept(row, RING_SELF, counted, fitted) / as_kept(row, TENSOR, counted, fitted),
            )
            for row in rows
            if row["N"] > 1 and row["tp_mb"] is not None
        ],
    }


def as_kept(row: Row, scheme: str, counted: Mapping[tuple[int, int, int], Row], fitted: Fit) -> float:
    """Bytes of a rank of table 4: what was counted, and the two constants."""
    kept = counted[row["N"], row["length"], row["batch"]][scheme]["kept"]
    extra = fitted.extra * row["batch"] * row["length"] * LARGE.hidden
    if scheme == TENSOR:
        return float(fitted.fixed / row["N"] + extra + kept)
    return float(fitted.fixed + extra / row["N"] + kept)


def throughput(found: Mapping[str, Any]) -> Cases:
    """Table 4's tokens per second."""
    clock = {(row["N"], row["length"], row["batch"]): row for row in found["clock"]["rows"]}
    rows = [row for row in published() if row["N"] > 1]
    n, batch, length = found["clock"]["fitted"]

    def mine(row: Row, column: str) -> float:
        return float(clock[row["N"], row["length"], row["batch"]][column])

    def fitted(row: Row, column: str) -> bool:
        return (row["N"], row["batch"], row["length"], column) == (n, batch, length, "sp_tokens_s")

    columns = ("tp_tokens_s", "sp_tokens_s")
    return {
        "table_4_tokens_per_second": [
            Case(f"{column}, {label(row)}", row[column], mine(row, column))
            for row in rows
            for column in columns
            if row[column] is not None and not fitted(row, column)
        ],
        "as_fast_as_tensor_parallelism": [
            Case(
                label(row),
                row["sp_tokens_s"] / row["tp_tokens_s"],
                mine(row, "sp_tokens_s") / mine(row, "tp_tokens_s"),
            )
            for row in rows
            if row["tp_tokens_s"] is not None
        ],
    }


def sizes(found: Mapping[str, Any]) -> Cases:
    """The headlines: what fits."""
    told = {row["id"]: float(row["value"]) for row in read_csv(FOLDER / "published_headlines.csv")}
    fits = {(row["model"], row["scheme"], row["N"]): row for row in found["sizes"]}

    def over(what: str, ranks: int) -> float:
        theirs = fits["BERT-Base", TENSOR, 12]
        return float(fits["BERT-Base", RING_SELF, ranks][what] / theirs[what])

    return {
        "largest_batch": [Case("512 tokens", told["batch"], over("batch", 64))],
        "longest_sequence_64": [Case("batch 64", told["length"], over("length", 64))],
        "longest_sequence_16": [Case("batch 64", told["length-16"], over("length", 16))],
        "linformer": [],
    }
