"""Linear + cross entropy, forward and backward: ours in chunks, Liger's, torch's two steps, and the three matmuls alone.

`meshfold bench linear-loss` times all in rounds and writes JSON; `--report FILE.json` makes the table from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import (
    Contestant,
    add_output,
    check_out,
    interleave,
    machine,
    median,
    parse_with_tiny,
    write,
)
from benchmarks.power import PowerLog
from benchmarks.reports import met, table

TINY = dict(rows=256, width=32, words=1000, dtype="float32", rounds=2, repeats=1, settle_s=0.0, chunks=[64])
MATMULS = "three matmuls"
BARS = dict(milliseconds=42.0, gib=1.5)
"""Aims for 8192 × 4096 → 128,256 in bfloat16 on an H200: time, and memory beyond the operands."""


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench linear-loss`."""
    parser = argparse.ArgumentParser(prog="meshfold bench linear-loss", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--words", type=int, default=128_256)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--chunks", type=int, nargs="*", default=[], help="sizes to try beside our own choice"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4, help="calls a round")
    parser.add_argument(
        "--settle-s", type=float, default=20.0, help="least seconds of warm-up: clocks settle"
    )
    add_output(parser, "linear_loss")
    options = parse_with_tiny(parser, argv, TINY)
    if options.report is not None:
        report(options.report)
        return 0
    check_out(options.out)
    found = contestants(options)
    begun = time.perf_counter()
    while time.perf_counter() - begun < options.settle_s:
        next(each for each in found if each.name == MATMULS).step()  # type: ignore[misc]
    for contestant in found:
        measure_memory(contestant)
    with PowerLog() as power:
        first = time.time()
        times = interleave(
            found, rounds=options.rounds, warm_up=2, repeats=options.repeats, between=lambda: None
        )
        drawn = power, first, time.time()
    settings = {name: getattr(options, name) for name in ("rows", "width", "words", "dtype")}
    result: dict[str, Any] = dict(area="linear-loss", machine=machine(), settings=settings, milliseconds=times,
                                  peak_bytes={each.name: each.peak_bytes for each in found},
                                  notes={each.name: each.note for each in found if each.note},
                                  error={each.name: each.error for each in found},
                                  power=drawn[0].mean(drawn[1], drawn[2], 1))  # fmt: skip
    write(options.out, result)
    report(options.out)
    return 0


def contestants(options: argparse.Namespace) -> list[Contestant]:
    """Return all, on the same operands; the error is of dW against float32's."""
    from meshfold.kernels import linear_cross_entropy

    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, options.dtype)
    torch.manual_seed(0)
    x = torch.randn(options.rows, options.width, device=device, dtype=dtype).requires_grad_()
    weight = (
        (torch.randn(options.words, options.width, device=device) * options.width**-0.5)
        .to(dtype)
        .requires_grad_()
    )
    labels = torch.randint(options.words, (options.rows,), device=device)
    leaves = (x, weight)

    def trained(loss: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(loss(), leaves)

    @torch.no_grad()
    def matmuls() -> tuple[Tensor, Tensor]:
        logits = x @ weight.t()
        return logits @ weight, logits.t() @ x

    def two_steps() -> Tensor:
        return F.cross_entropy((x @ weight.t()).float(), labels)

    def chunked(size: int | None) -> Callable[[], tuple[Tensor, ...]]:
        return trained(lambda: linear_cross_entropy(x, weight, labels, chunk=size))

    found = [Contestant(MATMULS, matmuls), Contestant("torch, two steps", trained(two_steps))]
    found.append(Contestant("ours", chunked(None)))
    found += [Contestant(f"ours, chunks of {size}", chunked(size)) for size in options.chunks]
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        def liger() -> Tensor:
            got = Liger.apply(x, weight, labels)
            return got[0] if isinstance(got, tuple) else got  # type: ignore[no-any-return]

        found.append(Contestant("Liger", trained(liger)))
    except ImportError as error:
        found.append(Contestant("Liger", note=str(error)))
    if options.rows * options.words <= 1 << 31:
        exact = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
        want = torch.autograd.grad(F.cross_entropy(exact[0] @ exact[1].t(), labels), exact[1])[0]
        for each in found:
            if each.step is not None and each.name != MATMULS:
                got = each.step()[1].float()
                each.error = float((got - want).norm() / want.norm())
                del got
    return found


def measure_memory(contestant: Contestant) -> None:
    """Note the largest memory of a call beyond what was there before it."""
    if contestant.step is None or not torch.cuda.is_available():
        return
    contestant.step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    contestant.step()
    torch.cuda.synchronize()
    contestant.peak_bytes = torch.cuda.max_memory_allocated() - before


def report(path: Path) -> None:
    """Write the table beside a result, and print it."""
    found = json.loads(path.read_text())
    rows = []
    for name, times in found["milliseconds"].items():
        gib = found["peak_bytes"][name] / 2**30
        bar = met(median(times) <= BARS["milliseconds"] and gib <= BARS["gib"]) if name == "ours" else ""
        error = found["error"][name]
        rows.append((name, f"{median(times):.2f} ({min(times):.2f}–{max(times):.2f})", f"{gib:.2f}",
                     "" if error != error else f"{error:.1e}", bar))  # fmt: skip
    for name, note in found["notes"].items():
        rows.append((name, "–", "–", "", note))
    s, words = found["settings"], ", ".join(f"{k} {v}" for k, v in found["machine"].items() if v is not None)
    power = found["power"]
    lines = [
        f"Measured on: {words}.", "",
        f"{s['rows']} tokens × {s['width']} → {s['words']:,} words, {s['dtype']}, forward and backward"
        + (f"; mean {power['watts']:.0f} W at {power['mhz']:.0f} MHz." if power else "."), "",
        *table(("contestant", "ms", "GiB beyond the operands", "error of dW",
                f"at most {BARS['milliseconds']:.0f} ms, {BARS['gib']} GiB"), rows),
    ]  # fmt: skip
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
