"""results/table.md, from numbers and claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.report import MARKS, NONE, Claim, claims_table, markdown, verdict
from experiments.sequence_parallelism.claims_table4 import as_kept
from experiments.sequence_parallelism.counting import RING, RING_SELF, TENSOR
from experiments.sequence_parallelism.exact import SMALL
from experiments.sequence_parallelism.plan import MB, Fit, published

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Ring self-attention: published, counted, planned and run

{verdict}

{claims}

{marks} **ours**: not published, checked all the same; **run**: found by running the authors' code.

## Table 4: memory

MB of a rank, BERT-Large on eight stages: published, then the closed form with two constants, {fixed:.1f} MB that do not grow with
the batch and {extra:.2f} bytes a token and hidden element beyond the layers, both from the rows N = 1 of SP. *As kept*: the same
constants with what autograd keeps of our layers, counted. *Our ring*: the layers with it, which keeps no scores.

{memory}

## Table 4: tokens per second

Published, and by the clock: the time of one rank, and bytes of the layers at {bandwidth:.2f} GB/s, fitted to the row in bold.

{clock}

## What a layer sends

Elements over BZ(L/N)A, forward + backward, counted on the first and the last rank. *Bytes*: in sum, in half precision, over the
same; both rings here sum dK and dV in float32.

{volumes}

## What would fit a P100

By the closed form, all layers and the head on every rank, 16 GB less 0.5: the largest batch at 512 tokens, and the longest
sequence at batch 64. TP needs as many heads as ranks.

{sizes}

## Causal work

Pairs of query and key that the busiest rank computes under a causal mask of {length} tokens, over an even share of those seen.

{work}

## Runs with values

{layers} layers of {hidden} on CPU ranks, worst rank: errors relative to the largest element, float64; bytes sent and kept, float32.

{runs}
"""
NAMES = {TENSOR: "TP", RING_SELF: "ring self-attention", RING: "our ring"}


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        fixed=found["fit"]["fixed"] / MB,
        extra=found["fit"]["extra"],
        memory=memory(found),
        bandwidth=found["clock"]["bandwidth"] / 1e9,
        clock=clock(found),
        volumes=volumes(found["volumes"]),
        sizes=sizes(found["sizes"]),
        length=2048,
        work=markdown(
            ["N", "our ring, zigzag", "a ring in order", "ring self-attention"],
            [
                [str(row["N"]), *(f"{row[name]:.2f}" for name in ("zigzag", "contiguous", RING_SELF))]
                for row in found["work"]
            ],
        ),
        layers=SMALL.layers,
        hidden=SMALL.hidden,
        runs=runs(found["runs"]),
    )


def memory(found: Mapping[str, Any]) -> str:
    """Table 4's memory."""
    fitted = Fit(fixed=found["fit"]["fixed"], extra=found["fit"]["extra"])
    counted = {(row["N"], row["length"], row["batch"]): row for row in found["kept"]}
    head = ["N", "batch", "tokens", "TP", "plan", "as kept", "SP", "plan", "as kept", "our ring"]
    rows = []
    for row, planned in zip(published(), found["memory"], strict=True):
        kept = {name: f"{as_kept(row, name, counted, fitted) / MB:.0f}" for name in NAMES}
        rows.append(
            [
                *(str(row[name]) for name in ("N", "batch", "length")),
                NONE + " (OOM)" if row["tp_mb"] is None else f"{row['tp_mb']:.2f}",
                f"{planned['tp_mb']:.0f}",
                kept[TENSOR],
                f"{row['sp_mb']:.2f}",
                f"{planned['sp_mb']:.0f}",
                kept[RING_SELF],
                kept[RING],
            ]
        )
    return markdown(head, rows)


def clock(found: Mapping[str, Any]) -> str:
    """Table 4's tokens per second."""
    fitted = found["clock"]["fitted"]
    rows = []
    for row, timed in zip(published(), found["clock"]["rows"], strict=True):
        bold = "**" if [row["N"], row["batch"], row["length"]] == fitted else ""
        rows.append(
            [
                *(str(row[name]) for name in ("N", "batch", "length")),
                NONE + " (OOM)" if row["tp_tokens_s"] is None else f"{row['tp_tokens_s']:.0f}",
                f"{timed['tp_tokens_s']:.0f}",
                f"{row['sp_tokens_s']:.0f}",
                f"{bold}{timed['sp_tokens_s']:.0f}{bold}",
            ]
        )
    return markdown(["N", "batch", "tokens", "TP", "clock", "SP", "clock"], rows)


def volumes(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a layer sends, a line for each model and number of ranks."""
    found = {(row["model"], row["N"], row["scheme"]): row for row in rows}
    lines = []
    for model, n in dict.fromkeys((model, n) for model, n, _ in found):
        line = [model, str(n)]
        for scheme in NAMES:
            row = found.get((model, n, scheme))
            if row is None:
                line += [NONE, NONE]
                continue
            block = row["B"] * row["L"] * row["H"] // row["N"]
            line += [
                f"{row['forward'] // block} + {row['backward'] // block}",
                f"{row['half bytes'] // block}",
            ]
        lines.append(line)
    return markdown(["model", "N", *(cell for name in NAMES.values() for cell in (name, "bytes"))], lines)


def sizes(rows: Sequence[Mapping[str, Any]]) -> str:
    """The largest batch and the longest sequence."""
    found = {(row["model"], row["N"], row["scheme"]): row for row in rows}
    lines = [
        [
            model,
            str(n),
            *(
                str(found[model, n, scheme][what]) if (model, n, scheme) in found else NONE
                for what in ("batch", "length")
                for scheme in NAMES
            ),
        ]
        for model, n in sorted(dict.fromkeys((model, n) for model, n, _ in found))
    ]
    head = ["model", "N", *(f"{what}, {name}" for what in ("batch", "tokens") for name in NAMES.values())]
    return markdown(head, lines)


def runs(rows: Sequence[Mapping[str, Any]]) -> str:
    """Runs with values."""
    return markdown(
        ["scheme", "N", "output off by", "gradient off by", "dQ, dK, dV", "sent", "kept"],
        [
            [
                NAMES[row["scheme"]],
                str(row["N"]),
                *(f"{row[name]:.0e}" if row[name] else "< 1e-12" for name in ("output error", "gradient error")),
                " ".join(f"{row[f'{name} ratio']:.3f}" for name in ("dQ", "dK", "dV")) if "dQ ratio" in row else NONE,
                str(row["sent"]),
                str(row["kept"]),
            ]
            for row in rows
        ],
    )
