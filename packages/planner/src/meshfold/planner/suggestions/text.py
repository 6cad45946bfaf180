"""A suggestion as text and as a picture: the best specs, why others lose, one spec's breakdown, time against memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshfold.mesh import SpecError
from meshfold.mesh.spec import format_bytes, format_table
from meshfold.planner.report import format_seconds
from meshfold.planner.suggestions.layouts import Candidate, Family
from meshfold.planner.suggestions.options import Option, Suggestion

_REJECTED = 6


def spec_words(candidate: Candidate) -> str:
    """``data=2, tensor=dict(mode='1d', size=4), zero=dict(stage=1)``: what is written inside ``dict(...)``."""
    words = []
    for name, value in _shortest(candidate.spec.to_dict()).items():
        words.append(f"{name}={_dict(value) if isinstance(value, dict) else repr(value)}")
    return ", ".join(words)


def settings_words(candidate: Candidate) -> list[str]:
    """Return the options of ``meshfold train`` and ``meshfold plan`` other than the spec: ``--recompute blocks``."""
    words = []
    if candidate.recompute is not None:
        words.append(f"--recompute {candidate.recompute}")
    if candidate.accumulate > 1:
        words.append(f"--accumulate {candidate.accumulate}")
    return words


def line_to_paste(candidate: Candidate) -> str:
    """Return the lines of a training script, and those of the command line."""
    more = []
    if candidate.recompute is not None:
        more.append(f"recompute={candidate.recompute!r}")
    if candidate.accumulate > 1:
        more.append(f"gradient_accumulation={candidate.accumulate}")
    engine = f"\nengine = Engine(model, parallel=parallel, {', '.join(more)}, ...)" if more else ""
    words = " ".join([f'--parallel "dict({spec_words(candidate)})"', *settings_words(candidate)])
    return f"parallel = dict({spec_words(candidate)}){engine}\n{words}"


def suggestion_table(found: Suggestion) -> str:
    """Return the table of the planned options."""
    rows: list[tuple[str, ...]] = [("", "a step", "tokens/s", "MFU", "a device holds", "parallel = dict(...)")]
    for number, one in enumerate(found.options, 1):
        words = "  ".join([spec_words(one.candidate), *settings_words(one.candidate)])
        speed = one.speed
        rows.append(
            (
                str(number),
                format_seconds(speed.seconds),
                f"{speed.tokens_per_second:,.0f}",
                f"{speed.mfu:.0%}",
                format_bytes(one.bytes),
                words,
            )
        )
    return "\n".join(format_table(rows, ">>>>><"))


def losers_table(found: Suggestion) -> str:
    """Return why other families lose, one line each, in the order of the search; empty if there are none."""
    lines: list[str] = []
    for one in sorted(found.rejected, key=lambda one: (one.outlook is None, one.seconds)):
        words = family_words(one.family)
        if one.seconds == float("inf"):
            lines.append(f"{words}: refused: {one.why}")
        else:
            about = "at least" if one.outlook is None else "about"
            lines.append(f"{words}: {about} {format_seconds(one.seconds)}: {one.why}")
    lines = lines[:_REJECTED]
    lines += [
        f"{spec_words(one.candidate)}: does not fit: {format_bytes(one.bytes)} a device" for one in found.misfits[:2]
    ]
    return "\n".join(["why others lose", *(f"  {line}" for line in lines)]) if lines else ""


def family_words(family: Family) -> str:
    """``data=4, tensor=2``"""
    spec, words = family.spec, []
    if family.data > 1:
        words.append(f"data={family.data}")
    if family.stages > 1:
        words.append(f"pipeline={family.stages}")
    if spec.sequence is not None:
        size = "" if spec.sequence.mode == "megatron" else f", size={spec.sequence.size}"
        words.append(f"sequence=dict(mode={spec.sequence.mode_name!r}{size})")
    if spec.tensor is not None:
        plain = spec.tensor.mode == "1d" and spec.tensor.attention is None
        words.append(f"tensor={spec.tensor.size}" if plain else f"tensor={_dict(_shortest(spec.to_dict())['tensor'])}")
    if spec.expert is not None:
        words.append(f"expert={spec.expert.size}")
    return ", ".join(words) or "one rank"


def breakdown(option: Option, best: Option | None = None) -> str:
    """Return how a step spends its seconds, next to the best spec's step unless it is the same."""
    mine = option.outlook.costs()
    theirs = {} if best is None or best is option else best.outlook.costs()
    rows: list[tuple[str, ...]] = [("seconds of a step", "this spec", *(["the best"] if theirs else []))]
    for what in dict.fromkeys([*mine, *theirs]):
        others = [format_seconds(theirs[what]) if what in theirs else "-"] if theirs else []
        rows.append((what, format_seconds(mine[what]) if what in mine else "-", *others))
    total = [format_seconds(best.speed.seconds)] if theirs and best is not None else []
    rows.append(("together, by the whole plan", format_seconds(option.speed.seconds), *total))
    return "\n".join(format_table(rows, "<>>"))


def suggestion_numbers(found: Suggestion) -> dict[str, Any]:
    """Return a suggestion as numbers for JSON."""
    return {
        "machine": found.machine.name,
        "ranks": found.ranks,
        "batch_size": found.batch_size,
        "seq_len": found.seq_len,
        "precision": found.precision,
        "considered": found.considered,
        "traces": found.traces,
        "plans": found.plans,
        "options": [
            {
                "parallel": _shortest(one.candidate.spec.to_dict()),
                "recompute": one.candidate.recompute,
                "accumulate": one.candidate.accumulate,
                "seconds": one.speed.seconds,
                "tokens_per_second": one.speed.tokens_per_second,
                "mfu": one.speed.mfu,
                "memory_bytes": one.bytes,
                "costs": one.outlook.costs(),
            }
            for one in found.options
        ],
        "rejected": [
            {
                "family": family_words(one.family),
                "seconds": None if one.seconds == float("inf") else one.seconds,
                "why": one.why,
            }
            for one in found.rejected
        ],
    }


def draw_suggestion(found: Suggestion, path: str | Path) -> None:
    """Draw seconds of a step against bytes of a device, with the Pareto front; a file ``.svg`` or ``.png``.

    Raises:
        SpecError: if Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SpecError("pictures need Matplotlib: pip install matplotlib") from error
    points = [(one.bytes / 2**30, one.speed.seconds, spec_words(one.candidate), True) for one in found.options]
    points += [
        (one.outlook.memory / 2**30, one.seconds, family_words(one.family), False)
        for one in found.rejected
        if one.outlook is not None
    ]
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    for planned, style, label in ((True, "o", "whole plan"), (False, "x", "outlook")):
        chosen = [point for point in points if point[3] is planned]
        if chosen:
            axes.plot([x for x, *_ in chosen], [y for _, y, *_ in chosen], style, label=label)
    front = pareto_front([(x, y) for x, y, *_ in points])
    axes.step([x for x, _ in front], [y for _, y in front], where="post", color="tab:gray", lw=1, label="Pareto front")
    axes.axvline(found.machine.memory / 2**30, color="tab:red", lw=1, ls="--", label="memory of a device")
    for x, y, words, _ in points:
        axes.annotate(words, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=6)
    axes.set(xlabel="GiB a device", ylabel="seconds a step", title=f"{found.ranks} ranks of {found.machine.name}")
    axes.legend(fontsize=7)
    figure.savefig(path)


def pareto_front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point beats in both numbers, sorted by the first.

    >>> pareto_front([(1.0, 5.0), (2.0, 6.0), (3.0, 1.0)])
    [(1.0, 5.0), (3.0, 1.0)]
    """
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _shortest(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a spec without settings that are the default."""
    found: dict[str, Any] = {}
    for name, value in spec.items():
        if name == "data" and value == 1:
            continue
        if isinstance(value, dict):
            value = {key: entry for key, entry in value.items() if (name, key, entry) not in _DEFAULTS}
            if name == "tensor" and value.get("mode") == "1d" and set(value) == {"mode", "size"}:
                value = value["size"]
            elif name == "pipeline" and value.get("schedule") not in ("interleaved", None):
                value.pop("chunks", None)
        found[name] = value
    return found


_DEFAULTS = [
    ("zero", "placement", "auto"),
    ("zero", "regime", "A"),
    ("pipeline", "schedule", "1f1b"),
    ("pipeline", "chunks", 1),
    ("pipeline", "waves", 1),
    ("pipeline", "waves", None),
]


def _dict(value: Any) -> str:
    if not isinstance(value, dict):
        return repr(value)
    return f"dict({', '.join(f'{key}={entry!r}' for key, entry in value.items())})"
