"""results/table.md, from the numbers and the claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.fastfold.overlap import MACHINE
from experiments.report import MARKS, NONE, Claim, claims_table, markdown, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# FastFold: axial parallelism of the Evoformer, published and ours

{verdict}

{claims}

{marks} **run**: the published code was run.

## Training time

{training}

## What a rank sends for a block

Millions of elements. *Tensor*: Megatron's tensor parallelism of attention and transitions, forward and backward; the four heads
of pairs allow four ranks. *FastFold*: the collectives of its published code, forward.

{traffic}

## A block on the clock, and what it keeps

Milliseconds of a block, forward, backward and the sum of gradients, on `{machine}` by the planner's clock; MiB that autograd
keeps of it.

{blocks}

## Longest chains

GiB of a rank at its peak in a prediction with 128 sequences, bf16, triangle multiplications in 16 steps, no operator chunked;
and the longest chain that fits.

{lengths}

## Gradients on two ranks

Two blocks in float64, beside one process.

{gradients}
"""


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    training = [
        [
            name,
            f"{row['hours']:.2f}",
            f"{row['hours'] / 24:.3f}",
            f"{row['published days']:.2f}",
            f"{row['device hours']:,.0f}",
            f"{row['published device hours']:,.0f}",
        ]
        for name, row in found["training"].items()
    ]
    traffic = [
        [
            row["phase"],
            str(row["N"]),
            *(f"{sent / 1e6:.1f}" for sent in row["dap"].values()),
            f"{sum(row['dap'].values()) / 1e6:.1f}",
            f"{sum(row['tensor'].values()) / 1e6:.1f}",
            f"{row['fastfold forward'] / 1e6:.1f}",
        ]
        for row in found["traffic"]
    ]
    kept = {(row["phase"], row["N"]): row["bytes"] for row in found["kept"]}
    blocks = [
        [
            row["phase"],
            str(row["N"]),
            f"{1e3 * row['sync']:.2f}",
            f"{1e3 * row['async']:.2f}",
            f"{1e3 * row['link']:.2f}",
            f"{kept[row['phase'], row['N']] / 2**20:,.0f}",
        ]
        for row in found["overlap"]
    ]
    first = found["lengths"][0]
    lengths = [
        [
            str(row["N"]),
            *(f"{peak / 2**30:.1f}" for peak in row["peak"].values()),
            *(f"{residues:,}" for residues in row["longest"].values()),
        ]
        for row in found["lengths"]
    ]
    gradients = [
        [
            row["backward"],
            f"{row['wrong']} of {row['gradients']}",
            f"{row['worst']:.1%}" if row["wrong"] else NONE,
            f"{row['outputs']:.0e}" if row["outputs"] else "0",
        ]
        for row in found["gradients"]
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        machine=MACHINE,
        training=markdown(["implementation", "hours", "days", "printed", "device hours", "printed hours"], training),
        traffic=markdown(
            ["sizes", "N", "forward", "backward", "gradients", "dap, sum", "tensor, sum", "FastFold, forward"], traffic
        ),
        blocks=markdown(["sizes", "N", "sync", "async", "link alone", "kept"], blocks),
        lengths=markdown(["N", *(f"{r} residues" for r in first["peak"]), *first["longest"]], lengths),
        gradients=markdown(["backward", "wrong", "by up to", "outputs off"], gradients),
    )
