"""Table and verdicts of a result of `meshfold bench decode`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import median, ratios
from benchmarks.reports import JOULES, joules, met, ratio, read_bars, table

JUDGED = dict(vocabulary=128256, hidden=4096, heads=32, kv_heads=8, ffn=14336, layers=32)
"""The model that the bars are for."""
OURS, COMPILED = "ours", "ours compiled"
PEER, GPT_FAST = "transformers static compiled", "gpt-fast by hand"
CONTINUOUS, LMDEPLOY = "transformers continuous batching", "LMDeploy PyTorch engine"
MANY = dict(batch=256, prompt=512, new=256)
"""The requests that their bars are for."""
FORMS = ("int8", "fp8", "int4")
"""Packed weights, after ours in a name."""
BARS = read_bars(
    "decode",
    ("milliseconds", "transformers", "gpt_fast", "bits8", "bits4", "two", "four", "many", "lmdeploy", "memory"),
)


def report(path: Path) -> None:
    """Write the table beside a result, and print it."""
    found = json.loads(path.read_text())
    settings, times = found["settings"], found["milliseconds"]
    ranks = settings.get("ranks", 1)
    bound = settings["weight_bytes"] / ranks / (settings["bandwidth"] * 1e9)
    peer = times.get(PEER)
    rows, sampled = [], any(found["power"].values())
    for name, values in times.items():
        tokens = [value / settings["new"] for value in values]
        power, gib = found["power"][name], found["peak_bytes"][name] / 2**30
        error, own = found["error"][name], settings.get("forward_error", {}).get(name, float("nan"))
        first = found.get("parts", {}).get(name, {}).get("prefill", float("nan"))
        after = (median(values) - first) / max(settings["new"] - 1, 1)
        rows.append(
            (
                name,
                f"{median(tokens):.3f} ({min(tokens):.3f}–{max(tokens):.3f})",
                f"{first:,.1f}" if first == first else "–",
                f"{after:.3f}" if after == after else "–",
                f"{settings['batch'] * 1e3 / median(tokens):,.0f}",
                f"{bound / median(tokens):.0%}",
                ratio(values, peer) if peer else "–",
                f"{gib:.2f}" if gib else "–",
                *(joules(power, median(values) / 1e3, settings["batch"] * settings["new"])[1:] if sampled else ()),
                f"{error:.1e}" if error == error else "–",
                f"{own:.1e}" if own == own else "–",
                found["notes"].get(name, ""),
            )
        )
    head = (
        "contestant",
        "ms a token",
        "prefill ms",
        "ms a token after it",
        "tokens/s",
        "of the bound",
        f"{PEER} ÷ this",
        "GiB beside weights",
        *(JOULES[1:] if sampled else ()),
        "error",
        "of a forward",
        "note",
    )
    rows += [(name, *["–"] * (len(head) - 2), note) for name, note in found["notes"].items() if name not in times]
    lines = [
        f"Measured on: {', '.join(f'{key} {value}' for key, value in found['machine'].items() if value is not None)}.",
        "",
        f"{settings['layers']} blocks, hidden {settings['hidden']:,}, heads {settings['heads']} and {settings['kv_heads']}, ffn "
        f"{settings['ffn']:,}, {settings['vocabulary']:,} words, {settings['dtype']}; {settings['batch']} sequences of "
        f"{settings['prompt']} + {settings['new']} tokens, greedy, prefill included"
        f"{f', split over {ranks} GPUs' if ranks > 1 else ''}. Bound: "
        f"{settings['weight_bytes'] / ranks / 1e9:.2f} GB at {settings['bandwidth']:g} TB/s, {bound:.2f} ms.",
        "",
        *table(head, rows),
        "",
    ]
    lines += [*bars(settings, times), *many(settings, times, found["notes"]), *memory(settings)]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def bars(settings: Mapping[str, Any], times: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Yield a line for each aim that a result can be judged by."""
    if settings["batch"] != 1 or any(settings[name] != value for name, value in JUDGED.items()):
        return
    ranks = settings.get("ranks", 1)
    ours = [name for name in times if name.startswith(OURS)]
    packed = {form: [name for name in ours if f"{OURS} {form}" in name] for form in FORMS}
    plain = [name for name in ours if not any(name in names for names in packed.values())]

    def fastest(names: Sequence[str]) -> str | None:
        return min(names, key=lambda name: median(times[name]), default=None)

    best = fastest(plain)
    if best is None:
        return
    for key in ("milliseconds", "two", "four"):
        value, bar = median(times[best]) / settings["new"], BARS[key]
        if bar.judged(ranks):
            yield f"- {bar.what.format(best=best)}: {value:.3f} (bar {bar.most:g}): {met(bar.met(value))}"
    for key, rival in (("transformers", PEER), ("gpt_fast", GPT_FAST)):
        if rival in times:
            yield BARS[key].line(ratios(times[best], times[rival])[0], ranks, best=best)
    for key, forms in (("bits8", ("int8", "fp8")), ("bits4", ("int4",))):
        if (found := fastest([name for form in forms for name in packed[form]])) is not None:
            yield BARS[key].line(ratios(times[found], times[best])[0], ranks, best=found, rival=best)


def many(settings: Mapping[str, Any], times: Mapping[str, Sequence[float]], notes: Mapping[str, str]) -> Iterator[str]:
    """Yield the verdicts on many requests at once; a peer that was stopped is at least so much slower.

    transformers is timed once, the others in every round.
    """
    best = min((name for name in (OURS, COMPILED) if name in times), key=lambda name: median(times[name]), default=None)
    if best is None or any(settings[name] != value for name, value in {**JUDGED, **MANY}.items()):
        return
    for key, peer in (("many", CONTINUOUS), ("lmdeploy", LMDEPLOY)):
        if peer in times:
            line = BARS[key].line(median(times[peer]) / median(times[best]), settings.get("ranks", 1), best=best)
            yield line + (" (at least: it was stopped)" if "stopped" in notes.get(peer, "") else "")


def memory(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what each generator planned, and the verdict on what it took where that was measured."""
    for name, found in settings.get("memory", {}).items():
        yield f"- {name}: planned {found['parts']}"
        for how in ("allocated", "reserved"):
            if found[how] is not None:
                off = abs(found[how] / found["planned"] - 1)
                yield BARS["memory"].line(off, 1, best=name, how=f"has {how}: {found[how] / 2**30:.2f} GiB")
