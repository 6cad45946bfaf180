"""What the zero-bubble paper publishes, beside what was simulated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.report import Case, Cases, Claim, read_claims, read_csv
from experiments.zero_bubble.settings import FOLDER

Row = Mapping[str, Any]


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    return read_claims(FOLDER, {**_table_5(found), **_auto(found), **_table_8(found), **_throughput(found)})


def published(file: str) -> dict[tuple[str, int], dict[str, str]]:
    """Rows of a published table by model and micro-batches."""
    return {(row["model"], int(row["m"])): row for row in read_csv(FOLDER / file)}


def _rates(rows: Iterable[Row], file: str, names: Sequence[str], own: str = "") -> list[Case]:
    printed = published(file)
    return [
        Case(
            f"{name}, {row['model']}, m {row['m']}",
            float(printed[row["model"], row["m"]][name]),
            row[own] if own else row["rate"][name],
        )
        for row in rows
        for name in names
    ]


def _table_5(found: Mapping[str, Any]) -> Cases:
    rows, file = found["rates"], "published_rates.csv"
    return {
        "table_5_1f1b_zb_h1_zb_h2": _rates(rows, file, ("1F1B", "ZB-H1", "ZB-H2")),
        "table_5_zb_2p": _rates(rows, file, ("ZB-2p",)),
        "table_5_1f1b_i": _rates(rows, file, ("1F1B-I",)),
        "1f1b_i_less_p_tcomm": [
            *_rates(rows, file, ("1F1B-I",), "p Tcomm less"),
            *_rates(found["fitted"], "published_rates_v.csv", ("1F1B-I",), "p Tcomm less"),
        ],
    }


def _auto(found: Mapping[str, Any]) -> Cases:
    printed = published("published_rates.csv")
    least = {(row["model"], row["m"]): row["least with a barrier"] for row in found["rates"]}

    def cases(memory: int, key: str, name: str) -> list[Case]:
        return [
            Case(
                f"{row['model']}, m {row['m']}",
                float(printed[row["model"], row["m"]][name]) if name else least[row["model"], row["m"]],
                row[key],
            )
            for row in found["auto"]
            if row["memory"] == memory
        ]

    return {
        "zb_1p_by_our_auto": cases(1, "rate", "ZB-1p"),
        "auto_2p_with_barrier": cases(2, "with a barrier", ""),
        "zb_2p_longest_span_by_our_auto": cases(2, "rate", "ZB-2p"),
    }


def _table_8(found: Mapping[str, Any]) -> Cases:
    rows, file = found["fitted"], "published_rates_v.csv"
    return {
        "table_8_zb_h2": _rates(rows, file, ("ZB-H2",)),
        "table_8_zb_v": _rates(rows, file, ("ZB-V",)),
    }


def _throughput(found: Mapping[str, Any]) -> Cases:
    rows = found["throughput"]

    def cases(*names: str, against: str = "") -> list[Case]:
        base = {(row["model"], row["microbatches"]): row for row in rows if row["schedule"] == against}
        made = []
        for row in rows:
            if row["schedule"] in names:
                one = base.get((row["model"], row["microbatches"]))
                theirs, ours = float(row["samples_per_gpu_s"]), row["simulated"]
                if one:
                    theirs, ours = theirs / float(one["samples_per_gpu_s"]), ours / one["simulated"]
                made.append(Case(f"{row['schedule']}, {row['model']}, m {row['microbatches']}", theirs, ours))
        return made

    barrier = published("published_barrier.csv")
    stepwise = [
        Case(
            f"{row['model']}, m {row['m']}",
            float(one["synchronized"]) / float(one["validated"]),
            (1 - row["with a barrier"]["ZB-2p"]) / (1 - row["rate"]["ZB-2p"]),
        )
        for row in found["rates"]
        if (one := barrier.get((row["model"], row["m"])))
    ]
    return {
        "table_4_gains": cases("ZB-1p", "ZB-2p", against="1F1B"),
        "table_4_throughput": cases("1F1B", "ZB-1p", "ZB-2p"),
        "table_4_1f1b_i": cases("1F1B-I"),
        "table_10_barrier": stepwise,
    }
