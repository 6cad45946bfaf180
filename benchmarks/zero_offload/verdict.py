"""What a result says about the bars of its cases."""

from __future__ import annotations

from typing import Any

from benchmarks.common import median
from benchmarks.reports import met
from benchmarks.zero_offload.cases import BARS, CASES, MINE, Bar, Case
from benchmarks.zero_offload.job import GIB

Runs = list[dict[str, Any]]


def rows(result: dict[str, Any], name: str) -> dict[str, Runs]:
    """A case's runs by contestant, with peers from the case that did the same work for them, where there is one."""
    own: dict[str, Runs] = dict(result["cases"][name]["rows"])
    case = CASES.get(name)
    if case is not None and case.peers_of in result["cases"]:
        for contestant, runs in result["cases"][case.peers_of]["rows"].items():
            if contestant not in MINE:
                own.setdefault(contestant, runs)
    return own


def seconds(run: dict[str, Any]) -> list[float]:
    """Of the timed steps of a run."""
    return [step["seconds"] for step in run.get("steps", []) if step["timed"]]


def all_seconds(runs: Runs) -> list[float]:
    """Of the timed steps of all runs."""
    return [one for run in runs for one in seconds(run)]


def factors(run: dict[str, Any]) -> list[float]:
    """Clip factors of the timed steps, where they are known."""
    found = [step["clip_factor"] for step in run.get("steps", []) if step["timed"]]
    return [factor for factor in found if factor is not None]


def peak(runs: Runs, key: str) -> float:
    """The largest of all runs, in GiB."""
    return max(float(run.get(key, 0)) for run in runs) / GIB


def ratios(ours: Runs, peer: Runs) -> list[float]:
    """Divide a peer's time for a sample by ours, round by round, within each call of the benchmark.

    The last round stands in where one has fewer. Runs of different calls, so perhaps of different machines, are never
    compared: without a call in common the list is empty.
    """
    found = []
    for call in dict.fromkeys(run.get("call") for run in ours):
        if call is None:
            continue
        a, b = ([_per_sample(run) for run in runs if run.get("call") == call and seconds(run)] for runs in (ours, peer))
        if a and b:
            found += [b[min(i, len(b) - 1)] / a[min(i, len(a) - 1)] for i in range(max(len(a), len(b)))]
    return found


def _per_sample(run: dict[str, Any]) -> float:
    return median(seconds(run)) / float(run["rows"])


def bars_of(case: Case) -> list[Bar]:
    """Return the bars of a case, without those of our predictions."""
    return [bar for bar in BARS.values() if case.name in bar.cases]


def bars(case: Case, found: dict[str, Runs]) -> list[str]:
    """Return a line for each bar of a case, and for each of our predictions."""
    own = bars_of(case)
    ours = next((found[name] for name in MINE if name in found and all_seconds(found[name])), None)
    if ours is None:
        return [f"- {described(bar)}: not measured" for bar in own]
    return [f"- {described(bar)}: {_judged(bar, ours, found)}" for bar in own] + _predictions(ours)


def described(bar: Bar) -> str:
    """Return a bar in words."""
    when = f", clip factor {bar.factor} in every timed step" if bar.factor else ""
    return {
        "faster": f"at least {bar.value:.3g} times as fast as the fastest of {', '.join(bar.than)}{when}",
        "tflops": f"at least {bar.value:g} TFLOP/s",
        "gpu_gib": f"at most {bar.value:g} GiB of GPU memory",
        "trains": "trains: all steps done, loss lower at the end",
        "largest": f"most samples a second, in no more memory, beside {', '.join(bar.than)}",
    }[bar.kind]


def _judged(bar: Bar, ours: Runs, found: dict[str, Runs]) -> str:
    last = next(run for run in reversed(ours) if seconds(run))
    peers = {name: found[name] for name in bar.than if name in found and ratios(ours, found[name])}
    if bar.kind == "tflops":
        sequence = next(iter(CASES.values())).seq_len
        speed = 6 * last["parameters"] * last["rows"] * sequence / median(all_seconds(ours)) / 1e12
        return f"{speed:.0f}, {met(speed >= bar.value)}"
    if bar.kind == "gpu_gib":
        gib = peak(ours, "gpu_peak_bytes")
        return f"{gib:.1f}, {met(gib <= bar.value)}"
    if bar.kind == "trains":
        losses = [step["loss"] for step in last["steps"]]
        done = all("error" not in run for run in ours)
        return f"{losses[0]:.3f} → {losses[-1]:.3f}, {met(done and losses[-1] < losses[0])}"
    if not peers:
        return "no peer measured in the same call"
    if bar.kind == "largest":
        slower = all(median(ratios(ours, runs)) > 1 for runs in peers.values())
        most = min(peak(runs, "gpu_peak_bytes") for runs in peers.values())
        return f"{met(slower)} in speed, {met(peak(ours, 'gpu_peak_bytes') <= most)} in memory"
    if bar.factor and not _factor_is(bar.factor, ours):
        return f"does not apply: factors were {', '.join(f'{f:.3g}' for f in factors(last)) or 'not known'}"
    name, runs = min(peers.items(), key=lambda item: median(ratios(ours, item[1])))
    value = median(ratios(ours, runs))
    missing = [peer for peer in bar.than if peer not in peers]
    without = f" (without {', '.join(missing)})" if missing else ""
    return f"{value:.2f} against {name}{without}, {met(value >= bar.value)}"


def _factor_is(wanted: str, runs: Runs) -> bool:
    found = [factor for run in runs for factor in factors(run)]
    return bool(found) and all((factor < 1) == (wanted == "below 1") for factor in found)


def _predictions(ours: Runs) -> list[str]:
    last = next(run for run in reversed(ours) if seconds(run))
    said = last.get("predicted") or {}
    lines = []
    for key, measured in (
        ("seconds", median(all_seconds(ours))),
        ("peak_gpu_bytes", peak(ours, "gpu_peak_bytes") * GIB),
    ):
        value, bar = said.get(key), BARS[f"predicted_{key}"].value
        if value is not None and measured:
            off = value / measured - 1
            lines.append(f"- predicted {key} within {bar:.0%}: {off:+.1%}, {met(abs(off) <= bar)}")
    return lines
