"""results/table.md, from the numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.report import MARKS, NONE, Claim, claims_table, markdown, verdict
from experiments.zero_bubble.claims import published

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Zero bubble: bubble rates and throughput, published and simulated

{verdict}

{claims}

{marks}

## Table 5: bubble rates

Published / simulated. ZB-2p is the paper's heuristic, written anew; in brackets, with one F more before the first B.

{rates}

## Between two barriers

Idle share of a step at whose end all ranks wait for each other, as exact clipping of gradients needs; *least*: what no order can
be below. `auto` was searched for pipelines of up to 8 ranks, within 1F1B's memory (p) and twice that (2 p).

{barrier}

## Table 8: bubble rates

Published / simulated. Tcomm and TW, in units of TF + TB + TW, are those that give 1F1B and ZB-H1 (so these two columns must agree);
TF / TB is that of table 9.

{fitted}

## Table 4: samples per GPU and second

Published / simulated. Simulated is micro-batch × m / (longest span × p), without anything beside F, B, W and messages.

{throughput}

Activations at most, in those that 1F1B holds: 1F1B and ZB-H1 1, ZB-H2 {h2}, ZB-2p {two}, 1F1B-I {interleaved}.
"""


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """The page, with its tables filled in."""
    held = {name: [row["activations"][name] for row in found["rates"]] for name in ("ZB-H2", "ZB-2p", "1F1B-I")}
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        rates=_rates(found),
        barrier=_barrier(found),
        fitted=_fitted(found),
        throughput=_throughput(found),
        h2=_span(held["ZB-H2"]),
        two=_span(held["ZB-2p"]),
        interleaved=_span(held["1F1B-I"]),
    )


def _size(row: Mapping[str, Any]) -> list[str]:
    return [row["model"], str(row["p"]), str(row["m"])]


def _rates(found: Mapping[str, Any]) -> str:
    names = ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-2p")
    printed = published("published_rates.csv")
    searched = {(row["model"], row["m"], row["memory"]): row["rate"] for row in found["auto"]}
    rows = []
    for row in found["rates"]:
        one = printed[row["model"], row["m"]]
        cells = [f"{float(one[name]):.4f} / {row['rate'][name]:.4f}" for name in names]
        cells[-1] += f" [{row['ZB-2p, one F more']:.4f}]"
        auto = searched.get((row["model"], row["m"], 1))
        rows.append([*_size(row), *cells, f"{float(one['ZB-1p']):.4f} / {NONE if auto is None else f'{auto:.4f}'}"])
    return markdown(["model", "p", "m", *names, "ZB-1p / auto"], rows)


def _barrier(found: Mapping[str, Any]) -> str:
    names = ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-2p")
    searched = {(row["model"], row["m"], row["memory"]): row["with a barrier"] for row in found["auto"]}
    rows = []
    for row in found["rates"]:
        auto = [searched.get((row["model"], row["m"], memory)) for memory in (1, 2)]
        cells = [f"{row['with a barrier'][name]:.4f}" for name in names]
        cells += [NONE if one is None else f"{one:.4f}" for one in auto]
        rows.append([*_size(row), *cells, f"{row['least with a barrier']:.4f}"])
    return markdown(["model", "p", "m", *names, "auto, p", "auto, 2 p", "least"], rows)


def _fitted(found: Mapping[str, Any]) -> str:
    names = ("1F1B", "ZB-H1", "ZB-H2", "1F1B-I", "ZB-V")
    printed = published("published_rates_v.csv")
    rows = []
    for row in found["fitted"]:
        one = printed[row["model"], row["m"]]
        cells = [f"{float(one[name]):.4f} / {row['rate'][name]:.4f}" for name in names]
        times = row["times"]
        rows.append([*_size(row), f"{times['send']:.4f}", f"{times['backward_weight']:.3f}", *cells])
    return markdown(["model", "p", "m", "Tcomm", "TW", *names], rows)


def _throughput(found: Mapping[str, Any]) -> str:
    names = ("1F1B", "1F1B-I", "ZB-1p", "ZB-2p")
    table: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in found["throughput"]:
        cells = table.setdefault((row["model"], row["p_gpus"], row["microbatches"]), {})
        digits = len(row["samples_per_gpu_s"].partition(".")[2])
        cells[row["schedule"]] = f"{row['samples_per_gpu_s']} / {row['simulated']:.{digits}f}"
    rows = [[*size, *(cells[name] for name in names)] for size, cells in table.items()]
    return markdown(["model", "p", "m", *names], rows)


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
