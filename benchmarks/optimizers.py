"""Steps of optimizers on the parameters of a Llama of 1B: ours beside torch's, DeepSpeed's FusedLamb and dion's Muon.

`meshfold bench optimizers` times all in rounds, after clocks have settled, with the power that each draws, and writes each as it
ends. Parameters are in bfloat16 with float32 masters and gradients, and a step ends when the bfloat16 ones are written, as in an
engine without ZeRO. An optimizer is made anew in each round, so that its state does not take memory from the others. `--report
FILE.json` makes the table from the JSON. `--case galore` trains a Llama of 7B with GaLore in 24 GiB.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch

from benchmarks import galore_memory
from benchmarks.common import (
    AVERAGED_S,
    add_output,
    add_rounds,
    check_out,
    machine,
    median,
    milliseconds,
    parse_with_tiny,
    ratios,
    synchronize,
    write,
)
from benchmarks.optimizer_contestants import (
    ADAMW,
    CHUNKED,
    FORWARD,
    LAMB,
    MUON,
    Parameters,
    Rival,
    rivals,
    without_missing,
)
from benchmarks.power import PowerLog
from benchmarks.reports import met, read_bars, table

TINY = dict(
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    ffn=96,
    words=128,
    rows=2,
    length=8,
    rounds=2,
    window_s=0.0,
    settle_s=0.0,
    dion=None,
)
JUDGED = dict(hidden=2048, layers=16, heads=32, kv_heads=8, ffn=8192, words=128_256)
"""The shape that the bars are for."""
BARS = read_bars("optimizers", ("lamb_adamw", "lamb_peer", "muon_adamw", "muon_peer", "galore"))


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench optimizers`."""
    parser = argparse.ArgumentParser(prog="meshfold bench optimizers", description=__doc__.split("\n")[0])
    for name, value in JUDGED.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument(
        "--rows", type=int, default=8, help="sequences of the forward and backward beside which steps are"
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens of each")
    parser.add_argument("--case", choices=("steps", "galore"), default="steps", help="galore: a Llama of 7B in 24 GiB")
    parser.add_argument("--steps", type=int, default=6, help="of --case galore")
    parser.add_argument("--rank", type=int, default=0, help="of its projections (1,024)")
    parser.add_argument("--lr", type=float, default=1e-3, help="of its matrices")
    parser.add_argument("--limit-gib", type=float, default=24.0, help="of its memory")
    parser.add_argument("--only", nargs="*", default=[], help="names of contestants, or their beginnings")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    parser.add_argument("--dion", type=Path, help="folder that has the package dion, where it is not installed")
    add_rounds(parser)
    add_output(parser, "optimizers")
    parser.set_defaults(rounds=3, window_s=1.8)
    options = parse_with_tiny(parser, argv, TINY)
    if options.case == "galore" and options.out == parser.get_default("out"):
        options.out = galore_memory.OUT
    if options.report is not None:
        galore_memory.report(options.report, BARS["galore"]) if options.case == "galore" else report(options.report)
        return 0
    if options.case == "galore":
        check_out(options.out)
        galore_memory.run(options, BARS["galore"])
        return 0
    if options.dion is not None:
        sys.path.insert(0, str(options.dion))
    found = [one for one in rivals() if not options.only or one.name.startswith(tuple(options.only))]
    if options.list or not found:
        print("\n".join(one.name for one in rivals()))
        return 0 if options.list else 2
    check_out(options.out)
    measure(found, options)
    report(options.out)
    return 0


def measure(found: Sequence[Rival], options: argparse.Namespace) -> None:
    """Try each contestant and time it at once, then those that run in more rounds; write the result after each of them."""
    found, left_out = without_missing(found)
    if left_out:
        print(left_out, flush=True)
    parameters = Parameters.of(options)
    times: dict[str, list[float]] = {}
    powers: dict[str, list[dict[str, float]]] = {}

    def write_result() -> None:
        running = [one for one in found if times.get(one.name)]
        result: dict[str, Any] = dict(
            area="optimizers",
            machine=machine(),
            settings={name: getattr(options, name) for name in (*JUDGED, "rows", "length", "window_s")},
            parameters=parameters.count,
            matrices=parameters.matrices,
            milliseconds=times,
            power={name: _mean(found) for name, found in powers.items()},
            least_bytes={one.name: one.least_bytes for one in running},
            peak_bytes={one.name: one.peak_bytes for one in running},
            launches={one.name: one.launches for one in running},
            error={one.name: one.error for one in running},
            notes={one.name: one.note for one in found if one.note},
            left_out=left_out,
        )
        write(options.out, result)

    begun = time.perf_counter()
    for number in range(options.rounds):
        for one in found:
            if number == 0:
                _try(one, parameters)
            said = one.note
            if one.runs:
                taken, power = _window(one, parameters, options.window_s, 0.0 if times else options.settle_s)
                times.setdefault(one.name, []).append(taken)
                powers.setdefault(one.name, []).append(power)
                said = f"{taken:.2f} ms"
            elif number:
                continue
            write_result()
            after = time.perf_counter() - begun
            print(f"{one.name}, round {number + 1} of {options.rounds}: {said} (after {after:.0f} s)", flush=True)


def _try(rival: Rival, parameters: Parameters) -> None:
    """Step a few times: compiles kernels, and notes the peak memory, the launches and the error, or why it cannot run."""
    step: Callable[[], object] | None = None
    try:
        rival.check_small()
        step = rival.make(parameters)
        step()
        rival.count_launches(step)
        synchronize()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            synchronize()
            rival.peak_bytes = torch.cuda.max_memory_allocated() - before
        rival.runs = True
    except Exception as error:  # what an optional peer raises where it cannot be built is not known
        rival.note = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    del step  # and with it the optimizer's state
    free()


def _window(rival: Rival, parameters: Parameters, window_s: float, settle_s: float) -> tuple[float, dict[str, float]]:
    """Make an optimizer anew, settle, and time it: return milliseconds a step, and mean watts and MHz where they were sampled."""
    with PowerLog() as log:
        step = rival.make(parameters)
        step()
        settle(step, settle_s)
        repeats = max(1, round(window_s * 1e3 / milliseconds(step, 2)))
        first = time.time()
        taken = milliseconds(step, repeats)
        last = time.time()
    del step
    free()
    return taken, log.mean(first + AVERAGED_S, last, 1)


def _mean(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return mean watts and MHz of the rounds in which they were sampled; empty where none were."""
    good = [power for power in found if power]
    return {key: sum(power[key] for power in good) / len(good) for key in good[0]} if good else {}


def settle(step: Callable[[], object], seconds: float) -> None:
    """Step for so long: clocks settle."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        step()
        synchronize()


def free() -> None:
    """Give memory of what is gone back to the device."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def report(path: Path) -> None:
    """Write the table beside a result, and print it."""
    found = json.loads(path.read_text())
    settings, times = found["settings"], found["milliseconds"]
    against = ADAMW if ADAMW in times else next(iter(times))
    rows = []
    for name, values in times.items():
        power, gib, least = found["power"][name], found["peak_bytes"][name] / 2**30, found["least_bytes"][name]
        moved = least * found["parameters"] / median(values) / 1e6
        rows.append(
            (
                name,
                f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})",
                f"{1 / _ratio(values, times[against]):.3f}",
                f"{moved:,.0f} of {least:g} B" if least else "–",
                str(found["launches"][name] or "–"),
                f"{gib:.2f}" if gib else "–",
                f"{power['watts'] * median(values) / 1e3:.2f}" if power else "–",
                f"{power['watts']:.0f}" if power else "–",
                f"{power['mhz']:.0f}" if power else "–",
                f"{found['error'][name]:.0e}" if found["error"][name] == found["error"][name] else "–",
                found["notes"].get(name, ""),
            )
        )
    rows += [(name, *["–"] * 9, note) for name, note in found["notes"].items() if name not in times]
    head = (
        "contestant",
        "ms",
        f"÷ {against}",
        "GB/s",
        "launches",
        "GiB beside",
        "J a step",
        "W",
        "MHz",
        "error",
        "note",
    )
    lines = [
        f"Measured on: {', '.join(f'{key} {value}' for key, value in found['machine'].items() if value is not None)}.",
        "",
        f"{found['parameters'] / 1e9:.2f} billion parameters ({found['matrices'] / 1e9:.2f} in matrices of {settings['layers']} "
        "layers), bfloat16 with float32 masters and gradients. Median of the rounds, with the lowest and the highest. GB/s: of "
        "the bytes a parameter that the algorithm must move. Error: of three small steps, against plain operations in float64.",
        "",
        *table(head, rows),
        "",
        *([f"- {found['left_out']}"] if found.get("left_out") else []),
    ]
    if all(settings[name] == value for name, value in JUDGED.items()):
        lines += judged(times)
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def judged(times: dict[str, list[float]]) -> list[str]:
    """Return a line for each bar that can be judged."""
    lines = []
    for adamw in (ADAMW, CHUNKED):
        if adamw in times and LAMB in times:
            value = _ratio(times[adamw], times[LAMB])
            bar = BARS["lamb_adamw"]
            lines.append(f"- {bar.what.format(adamw=adamw)}: {value:.3f} (bar {bar.most:g}): {met(bar.met(value))}")
    if "DeepSpeed FusedLamb" in times and LAMB in times:
        lines.append(BARS["lamb_peer"].line(_ratio(times[LAMB], times["DeepSpeed FusedLamb"]), 1))
    if {MUON, ADAMW, FORWARD} <= times.keys():
        whole = {name: [a + b for a, b in zip(times[FORWARD], times[name], strict=False)] for name in (MUON, ADAMW)}
        value, bar = _ratio(whole[ADAMW], whole[MUON]), BARS["muon_adamw"]
        lines.append(f"- {bar.what.format(adamw=ADAMW)}: {value:.3f} (bar {bar.most:g}): {met(bar.met(value))}")
        lines.append(f"- the step of Muon alone, times that of {ADAMW}: {_ratio(times[ADAMW], times[MUON]):.2f}")
    if MUON in times:
        for peer in (name for name in times if name.startswith(("dion", "torch Muon"))):
            value = _ratio(times[MUON], times[peer])
            lines.append(
                BARS["muon_peer"].line(value, 1, peer=peer)
                if peer.startswith("dion")
                else f"- Muon against {peer}: {value:.3f}"
            )
    return lines


def _ratio(ours: Sequence[float], peer: Sequence[float]) -> float:
    """Return the median of the peer's time by ours over the rounds that both have; a run that was cut ends with fewer of one."""
    rounds = min(len(ours), len(peer))
    return ratios(ours[:rounds], peer[:rounds])[0]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
