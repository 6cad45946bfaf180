"""One rank of ``meshfold reproduce attention-schemes --measure N``: every scheme of N ranks, run for real beside the clock."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from experiments.attention_schemes.counting import Scheme, parts
from experiments.measuring import Measured, Notes, median, precision_of, shared_cores
from experiments.report import markdown
from meshfold.mesh import Mesh
from meshfold.sequence import attention

PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# Attention schemes that ran

{ranks} ranks on {device}, {kind}; {tokens} tokens, {heads} heads of {head_dim} with {kv_heads} of keys and values, causal, median
of {repeats}. Published for eight GPUs: zigzag 1.67 to 1.71 times as fast as the basic ring, forward and backward.

{table}

{verdict}
"""


def measure(notes: Notes) -> None:
    """Time forward, and forward with backward, of every ring and exchange that the ranks make."""
    for scheme in parts(notes.ranks):
        orders = ["contiguous"] * (scheme.ring > 1) + [scheme.order] * (notes.options.heads % scheme.ulysses == 0)
        for order in orders:
            name = f"ring {scheme.ring}, Ulysses {scheme.ulysses}, {order}"
            notes.add(name, partial(one, replace(scheme, order=order), notes.options, notes.device))


def one(scheme: Scheme, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds of a scheme."""
    mesh = Mesh(scheme.axes)
    group = mesh.group(*scheme.axes)

    def share_of(heads: int) -> torch.Tensor:
        shape = (1, options.tokens // scheme.ranks, heads, options.head_dim)
        x = torch.randn(shape, device=device, dtype=precision_of(device))
        return x.requires_grad_()

    q, k, v = (share_of(heads) for heads in (options.heads, options.kv_heads, options.kv_heads))

    def forward() -> torch.Tensor:
        return attention(q, k, v, mesh=mesh, mode=scheme.mode, causal=True, order=scheme.order)

    def both() -> None:
        forward().sum().backward()
        q.grad = k.grad = v.grad = None

    found = {
        "ring": scheme.ring,
        "ulysses": scheme.ulysses,
        "order": scheme.order,
        "forward": median(forward, options.repeats, group, device),
        "both": median(both, options.repeats, group, device),
    }
    mesh.close()
    return found


def page(found: Mapping[str, Any]) -> str:
    """measured.md."""
    basic = {(row["ring"], row["ulysses"]): row for row in found["rows"] if row["order"] == "contiguous"}
    rows = [
        [
            str(row["ring"]),
            str(row["ulysses"]),
            row["order"] if row["ring"] > 1 else "one block",
            *(f"{1 / row[key]:.1f}" for key in ("forward", "both")),
            f"{basic.get((row['ring'], row['ulysses']), row)['both'] / row['both']:.2f}",
        ]
        for row in found["rows"]
    ]
    head = ["ring", "Ulysses", "order", "forward, 1/s", "with backward, 1/s", "by the basic ring's"]
    keys = ("ranks", "device", "kind", "tokens", "heads", "head_dim", "kv_heads", "repeats")
    return PAGE.format(
        **{key: found[key] for key in keys}, table=markdown(head, rows), verdict=" ".join(shared_cores(found))
    )


MEASURED = Measured(
    file=__file__,
    about=__doc__,
    sizes=(  # Sizes; on GPUs by default the heads of Llama-3.1-8B.
        ("tokens", 256, 65_536, "of the whole sequence"),
        ("heads", 4, 32, "of queries"),
        ("kv-heads", 4, 8, "of keys and values"),
        ("head-dim", 16, 128, "elements of a head"),
        ("repeats", 3, 7, "of every time"),
    ),
    shown=("tokens", "heads", "kv_heads", "head_dim", "repeats"),
    run=measure,
    page=page,
)
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
