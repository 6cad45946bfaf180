"""Linear + cross entropy, forward and backward: ours in chunks, Liger's, torch's two steps, and the three matmuls alone.

`meshfold bench linear-loss` times all in rounds, after clocks have settled, with the power that each draws. It writes JSON;
`--report FILE.json` makes the table from it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import (
    Contestant,
    add_output,
    add_rounds,
    check_out,
    median,
    parse_with_tiny,
)
from benchmarks.measuring import measure
from benchmarks.reports import met, ratio, read_bars, table

TINY = dict(rows=256, width=32, words=1000, dtype="float32", rounds=2, window_s=0.0, settle_s=0.0, chunks=[64])
MATMULS, OURS, LIGER = "three matmuls", "ours", "Liger"
BARS = read_bars("linear_loss", ("milliseconds", "gib"))
JUDGED = dict(rows=8192, width=4096, words=128_256, dtype="bfloat16")
"""The work that the bars are for."""


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench linear-loss`."""
    parser = argparse.ArgumentParser(prog="meshfold bench linear-loss", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--words", type=int, default=128_256)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="sizes to try beside our own choice")
    parser.add_argument("--variants", action="store_true", help="add the other ways of ours, such as recomputed logits")
    add_rounds(parser)
    add_output(parser, "linear_loss")
    options = parse_with_tiny(parser, argv, TINY)
    if options.report is not None:
        report(options.report)
        return 0
    check_out(options.out)
    found = contestants(options)
    measure("linear-loss", found, options, settings=("rows", "width", "words", "dtype", "window_s"))
    report(options.out)
    return 0


def contestants(options: argparse.Namespace) -> list[Contestant]:
    """Return all, on the same operands; the error is that of dW, or of dx where it is larger, against float32's."""
    from meshfold.kernels import linear_cross_entropy, linear_log_probs

    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, options.dtype)
    torch.manual_seed(0)
    x = torch.randn(options.rows, options.width, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(options.words, options.width, device=device) * options.width**-0.5
    weight = weight.to(dtype).requires_grad_()
    labels = torch.randint(options.words, (options.rows,), device=device)
    leaves = (x, weight)

    def trained(loss: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(loss(), leaves)

    @torch.no_grad()
    def matmuls() -> tuple[Tensor, Tensor]:
        logits = x @ weight.t()
        return logits @ weight, logits.t() @ x

    def ours(**settings: Any) -> Callable[[], tuple[Tensor, ...]]:
        return trained(lambda: linear_cross_entropy(x, weight, labels, **settings))

    def log_probs() -> Tensor:
        values, entropies = linear_log_probs(x, weight, labels, entropy=True)
        return (values + 0.01 * entropies).mean()  # type: ignore[operator]

    found = [
        Contestant(MATMULS, matmuls),
        Contestant("torch, two steps", trained(lambda: F.cross_entropy((x @ weight.t()).float(), labels))),
        Contestant(OURS, ours()),
        *(Contestant(f"ours, chunks of {size}", ours(chunk=size)) for size in options.chunks),
    ]
    if options.variants:
        if device == "cuda":
            found.append(Contestant("ours, loss and gradient in two kernels", in_two_kernels(ours())))
        found += [
            Contestant("ours, dW added up in float32", ours(accumulate=torch.float32)),
            Contestant("ours, logits made again", ours(recompute=True)),
            Contestant("ours, log-probabilities and entropy", trained(log_probs), note="another loss; four matmuls"),
        ]
    try:
        liger = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
        fused = liger.LigerFusedLinearCrossEntropyFunction.apply
        found.append(Contestant(LIGER, trained(lambda: torch.utils._pytree.tree_leaves(fused(x, weight, labels))[0])))
    except ImportError as error:
        found.append(Contestant(LIGER, note=str(error)))
    if options.rows * options.words <= 1 << 31:
        exact = tuple(leaf.detach().float().requires_grad_() for leaf in leaves)
        want = torch.autograd.grad(F.cross_entropy(exact[0] @ exact[1].t(), labels), exact)
        for each in found:
            if each.step is not None and each.name != MATMULS and "entropy" not in each.name:
                each.error = max(
                    float((got.float() - one).norm() / one.norm()) for got, one in zip(each.step(), want, strict=True)
                )
    return found


def in_two_kernels(step: Callable[[], Any]) -> Callable[[], Any]:
    """Return a step of ours in which sums and gradient are two kernels, which read the logits twice."""
    from meshfold.kernels import cross_entropy_triton as kernels
    from meshfold.kernels.cross_entropy import Terms, loss_per_row

    def both(logits: Tensor, labels: Tensor, share: Tensor, terms: Terms) -> Tensor:
        row_max, sums = kernels.sum_rows(logits, None, labels, terms, terms.smooths)
        kernels.gradient(logits, row_max, sums[0], labels, share, terms, logits)
        return loss_per_row(row_max, sums, terms.label_smoothing, terms.z_loss, terms.vocab_size)

    def run() -> Any:
        with mock.patch.object(kernels, "write_losses_and_gradient", both):
            return step()

    return run


def report(path: Path) -> None:
    """Write the table beside a result, and print it."""
    found = json.loads(path.read_text())
    settings, times = found["settings"], found["milliseconds"]
    rows = []
    for name, values in times.items():
        power, error, gib = found["power"][name], found["error"][name], found["peak_bytes"][name] / 2**30
        rows.append(
            (
                name,
                f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})",
                ratio(values, times[MATMULS]),
                f"{gib:.2f}" if gib else "–",
                f"{power['watts'] * median(values) / settings['rows']:.3f}" if power else "–",
                f"{power['watts']:.0f}" if power else "–",
                f"{power['mhz']:.0f}" if power else "–",
                "–" if math.isnan(error) else f"{error:.1e}",
                found["notes"].get(name, ""),
            )
        )
    rows += [(name, *["–"] * 7, note) for name, note in found["notes"].items() if name not in times]
    head = (
        "contestant",
        "ms",
        "matmuls ÷ this",
        "GiB beyond the operands",
        "mJ a token",
        "W",
        "MHz",
        "error",
        "note",
    )
    values = {"milliseconds": median(times[OURS]), "gib": found["peak_bytes"][OURS] / 2**30}
    lines = [
        f"Measured on: {', '.join(f'{key} {value}' for key, value in found['machine'].items() if value is not None)}.",
        "",
        f"{settings['rows']:,} tokens × {settings['width']:,} → {settings['words']:,} words, {settings['dtype']}, forward and "
        "backward. Median of the rounds, with the lowest and the highest.",
        "",
        *table(head, rows),
        "",
    ]
    if all(settings[name] == value for name, value in JUDGED.items()):
        for name, bar in BARS.items():
            lines.append(f"- {bar.what}: {values[name]:.2f} (bar {bar.most:g}): {met(bar.met(values[name]))}")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
