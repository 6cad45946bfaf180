"""One rank of ``meshfold reproduce attention-schemes --measure N``: every scheme of N ranks, run for real beside the clock."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from experiments.attention_schemes.counting import Scheme, parts
from experiments.measuring import measured, median, results, shared_cores, sizes
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on this rank; rank 0 writes measured.json and measured.md."""
    return measured(argv, arguments(), measure, page)


def arguments() -> argparse.ArgumentParser:
    """Sizes; on GPUs by default the heads of Llama-3.1-8B."""
    table = [
        ("tokens", 256, 65_536, "of the whole sequence"),
        ("heads", 4, 32, "of queries"),
        ("kv-heads", 4, 8, "of keys and values"),
        ("head-dim", 16, 128, "elements of a head"),
        ("repeats", 3, 7, "of every time"),
    ]
    return sizes(__doc__, Path(__file__).parent, table)


def measure(options: argparse.Namespace, ranks: int, device: torch.device) -> dict[str, Any]:
    """Time forward, and forward with backward, of every ring and exchange that the ranks make."""
    rows = []
    for scheme in parts(ranks):
        if scheme.ring > 1:
            rows.append(one(replace(scheme, order="contiguous"), options, device))
        if options.heads % scheme.ulysses == 0:
            rows.append(one(scheme, options, device))
    names = ("tokens", "heads", "kv_heads", "head_dim", "repeats")
    return results(options, names, ranks, device, _dtype(device), rows)


def one(scheme: Scheme, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds of a scheme."""
    mesh = Mesh(scheme.axes)
    group = mesh.group(*scheme.axes)

    def share_of(heads: int) -> torch.Tensor:
        shape = (1, options.tokens // scheme.ranks, heads, options.head_dim)
        x = torch.randn(shape, device=device, dtype=_dtype(device))
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


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


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


if __name__ == "__main__":
    sys.exit(main())
