"""Adam on the CPU, ours side by side with torch's fused AdamW and DeepSpeed's CPUAdam.

Two comparisons: *raw*, float32 gradient, parameter and moments; and the *real path* of offloaded training, a bfloat16
gradient in and a bfloat16 parameter out, for which the peers need a cast before the step and one after it. All
contestants step the same numbers in one process, in interleaved rounds, on the same number of threads.
`meshfold bench cpu-adam` writes JSON with the raw times; `--report FILE.json` makes the table and the plot from it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch
from torch import Tensor

from benchmarks import reports
from benchmarks.common import Contestant, add_output, check_out, interleave, machine, median, ratios, write
from experiments.toml_tables import read_tables

HYPER: dict[str, Any] = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}
BETAS = (0.9, 0.999)

# Name: comparison, useful bytes a parameter. "bytes" of a peer's real path count no cast, as the table says.
CONTESTANTS: dict[str, tuple[str, int]] = {
    "raw: float32": ("raw", 28),
    "raw: torch fused": ("raw", 28),
    "raw: DeepSpeed": ("raw", 28),
    "real: float32 master, bfloat16 copy": ("real", 28),
    "real: split master (A)": ("real", 26),
    "real: bfloat16 moments (B)": ("real", 18),
    "real: 8-bit moments (C)": ("real", 14),
    "real: torch fused with casts": ("real", 28),
    "real: DeepSpeed with casts": ("real", 28),
}
PEERS = {
    "raw": ("raw: torch fused", "raw: DeepSpeed"),
    "real": ("real: torch fused with casts", "real: DeepSpeed with casts"),
}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Aim: ``ours`` is ``least`` times as fast as each contestant of ``than``. A table of bars/cpu_adam.toml."""

    ours: str
    than: tuple[str, ...]
    least: float


BARS = read_tables(reports.BARS / "cpu_adam.toml", Bar)
for _name, _bar in BARS.items():
    reports.check_known("cpu_adam", _name, "ours and than", (_bar.ours, *_bar.than), CONTESTANTS)


def main(argv: list[str]) -> int:
    """Entry point of `meshfold bench cpu-adam`."""
    parser = argparse.ArgumentParser(prog="meshfold bench cpu-adam", description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=1, help="steps a timing")
    add_output(parser, "cpu_adam")
    args = parser.parse_args(argv)
    if args.report:
        return report(args.report)
    check_out(args.out)
    torch.set_num_threads(args.threads)
    load = os.getloadavg()[0]
    contestants = []
    for name in CONTESTANTS:
        contestants.append(_build(name, args.parameters))
        made = contestants[-1]
        print(f"{name:<40} error {made.error:.1e}  {made.note}", flush=True)
    times = interleave(contestants, rounds=args.rounds, warm_up=2, repeats=args.repeats)
    result = {
        "area": "cpu-adam",
        "machine": {**machine(), **_versions(), "load_before": load},
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "report")},
        "milliseconds": times,
        "relative_error": {c.name: c.error for c in contestants if c.step is not None},
        "notes": {c.name: c.note for c in contestants if c.note},
    }
    write(args.out, result)
    print(table(result))
    print(f"written to {args.out}")
    return 0


Step = Callable[[], object]


def _build(name: str, n: int) -> Contestant:
    try:
        check, _ = _make(name, 100_000)
        error = check()
        _, step = _make(name, n)
    except Exception as error_met:  # a contestant that cannot run is a row with its reason
        reason = str(error_met).strip().splitlines() or [""]
        return Contestant(name, note=f"could not run: {type(error_met).__name__}: {reason[0][:200]}")
    return Contestant(name, step, error=error)


def _make(name: str, n: int) -> tuple[Callable[[], float], Step]:
    """(what steps five times and says how far the parameter is from float64's, what steps once)."""
    generator = torch.Generator().manual_seed(0)
    start = 0.1 * torch.randn(n, generator=generator)
    grad = 0.01 * torch.randn(n, generator=generator)
    real = name.startswith("real")
    grad = grad.bfloat16() if real else grad
    if "torch" in name or "DeepSpeed" in name:
        step, parameter = _peer(name, start, grad, real)
    else:
        step, parameter = _ours(name, start, grad)

    def check() -> float:
        exact = torch.nn.Parameter(start.double())
        optimizer = torch.optim.AdamW([exact], betas=BETAS, **HYPER)
        exact.grad = grad.double()
        for _ in range(5):
            step()
            optimizer.step()
        moved = (exact.detach() - start).norm()
        return float((parameter().double() - exact.detach()).norm() / moved)

    return check, step


def _ours(name: str, start: Tensor, grad: Tensor) -> tuple[Step, Callable[[], Tensor]]:
    from meshfold import kernels as K

    state: K.AdamState
    if "float32" in name:
        state = K.WholeState.of(start.clone(), torch.bfloat16 if name.startswith("real") else None)
    elif "(C)" in name:
        state = K.QuantizedState.of(start)
    else:
        state = K.SplitState.of(start, torch.bfloat16 if "(B)" in name else torch.float32)
    settings = K.AdamSettings(beta1=BETAS[0], beta2=BETAS[1], **HYPER)
    count = [0]

    def step() -> None:
        count[0] += 1
        K.adam_step(state, grad, settings, step=count[0])

    return step, state.master


def _peer(name: str, start: Tensor, grad: Tensor, real: bool) -> tuple[Step, Callable[[], Tensor]]:
    p = torch.nn.Parameter(start.clone())
    if "torch" in name:
        optimizer: Any = torch.optim.AdamW([p], betas=BETAS, fused=True, **HYPER)
    else:
        deepspeed = importlib.import_module("deepspeed.ops.adam")
        optimizer = deepspeed.DeepSpeedCPUAdam([p], betas=BETAS, adamw_mode=True, **HYPER)
    wide = torch.empty_like(start) if real else grad
    out = torch.empty_like(start, dtype=torch.bfloat16)
    p.grad = wide

    @torch.no_grad()
    def step() -> None:
        if real:
            wide.copy_(grad)
        optimizer.step()
        if real:
            out.copy_(p)

    return step, p.detach


def _versions() -> dict[str, Any]:
    """The processor's model and the versions of what was measured."""
    from importlib import metadata

    found: dict[str, Any] = {}
    for package in ("numba", "llvmlite", "deepspeed"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        found["cpu"] = next(models, None)
        flags = next((line for line in lines if line.startswith("flags")), "").split()
        found["avx512"] = "avx512f" in flags
    except OSError:
        found["cpu"] = None
    return found


def table(result: dict[str, Any]) -> str:
    """Markdown: ratios first, then times and rates, then the bars."""
    times = result["milliseconds"]
    head = [
        "contestant",
        "torch fused ÷ this",
        "DeepSpeed ÷ this",
        "ms",
        "ns a parameter",
        "useful GB/s",
        "error",
    ]
    lines = [*reports.table(head, (_row(result, name) for name in CONTESTANTS)), ""]
    for bar in BARS.values():
        for peer in bar.than:
            what = f"- {bar.ours} at least {bar.least} times as fast as {peer.partition(': ')[2]}"
            if bar.ours in times and peer in times:
                middle = ratios(times[bar.ours], times[peer])[0]
                lines.append(f"{what}: {middle:.2f}, {reports.met(middle >= bar.least)}")
            else:
                lines.append(f"{what}: not measured")
    return "\n".join(lines)


def _row(result: dict[str, Any], name: str) -> list[str]:
    times, n = result["milliseconds"], result["settings"]["parameters"]
    if name not in times:
        return [name, result["notes"].get(name, "not measured")]
    comparison, size = CONTESTANTS[name]
    middle = median(times[name])
    return [
        name,
        *(reports.ratio(times[name], times[peer], 2) if peer in times else "–" for peer in PEERS[comparison]),
        f"{middle:.1f}",
        f"{middle * 1e6 / n:.2f}",
        f"{size * n / middle / 1e6:.1f}",
        f"{result['relative_error'][name]:.1e}",
    ]


def report(path: Path) -> int:
    """Write the table and the plot next to a result."""
    result = json.loads(path.read_text())
    times = result["milliseconds"]
    heights = [sum(CONTESTANTS[name][0] == one for name in times) + 1.5 for one in PEERS]
    figure, panels = reports.panels(len(PEERS), 1, 0.45 * sum(heights) + 0.7, height_ratios=heights)
    titles = {"raw": "float32 in, float32 out", "real": "bfloat16 gradient in, bfloat16 parameter out"}
    for panel, (comparison, peers) in zip(panels[:, 0], PEERS.items(), strict=True):
        names = [name for name in CONTESTANTS if CONTESTANTS[name][0] == comparison and name in times]
        names.sort(key=lambda name: median(times[name]))
        shown = {name.partition(": ")[2]: median(times[name]) for name in names}
        ours = [name.partition(": ")[2] for name in names if name not in peers]
        reports.draw_bars(panel, shown, ours, "ms a step")
        panel.set_title(titles[comparison])
    s = result["settings"]
    size = f"{s['parameters'] / 1e6:.0f} M parameters, {s['threads']} threads"
    reports.title(figure, f"Adam on {size}\nMeshfold blue, peers grey")
    reports.save(figure, [_described(result), "", table(result)], path)
    return 0


def _described(result: dict[str, Any]) -> str:
    s, m = result["settings"], result["machine"]
    return (
        f"{s['parameters'] / 1e6:g} M parameters, {s['threads']} threads on {m['cpu_cores']} cores ({m['cpu']}"
        f"{', AVX-512' if m['avx512'] else ''}); torch {m['torch']}, numba {m['numba']}, DeepSpeed "
        f"{m['deepspeed'] or 'not installed'}. Median of {s['rounds']} interleaved rounds; ratios above 1 say that the "
        f"row is faster than that peer (lowest and highest round in brackets). *Error* is the distance of the float32 "
        f"parameter from float64's after five steps, relative to the way it went. Load of the machine before: "
        f"{m['load_before']:.1f}."
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
