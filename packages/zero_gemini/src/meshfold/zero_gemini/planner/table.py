"""A plan as a readable table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from meshfold.mesh.model_io import ATTENTION_OF
from meshfold.mesh.spec import format_bytes, format_table
from meshfold.zero_gemini.planner.options import STRATEGIES
from meshfold.zero_gemini.planner.result import Plan


def table(plan: Plan) -> str:
    """Format a plan as a table: placements (equal chunks in one row), bytes and limits, terms of the step; ``<`` binds."""
    workload = plan.workload
    head = (
        f"{workload.name} on {plan.machine.name}: {workload.elems / 1e9:.3g} G elements a rank, {workload.tokens} tokens, "
        f"regime {workload.regime.name}, policy {plan.policy}\n"
        f"{plan.seconds:.4g} s a step{' (no plan is faster)' if plan.proved else ''}; {STRATEGIES[plan.strategy]}"
    )
    if plan.workload.shadow_copies is not None:
        head += f"; shadow copies of {plan.copied_fraction:.0%} of the host's state, the first chunks'"
    places = [("chunks", "elements", "state", "parameters", "gradients")]
    sized = zip(plan.chunks, workload.chunks, strict=True)
    for where, run in groupby(sized, key=lambda pair: (pair[0].state, pair[0].parameters, pair[0].gradients)):
        members = list(run)
        elems = sum(chunk.elems for _, chunk in members)
        places.append((_span([made.name for made, _ in members]), f"{elems:,}", *where))
    text = [head, "", *format_table(places)]
    if plan.layers:
        text += ["", *format_table(_layer_rows(plan))]
    gpu, host, disk = plan.limits.as_tuple()
    peaks = [("memory", "peak", "limit", "at timestep")]
    for name, series, limit in (
        ("GPU", plan.gpu_bytes, gpu),
        ("host", plan.host_bytes, host),
        ("disk", plan.disk_bytes, disk),
    ):
        peak = max(series)
        peaks.append((name, format_bytes(peak), _limit(limit), str(series.index(peak)) if name == "GPU" else "all"))
    text += ["", *format_table(peaks)]
    rows = [("phase", "term", "seconds", "")]
    for name, weight, seconds in plan.phases:
        shown = name if weight == 1 else f"{name} ({weight:.0%} of steps)" if weight < 1 else f"{name} (×{weight})"
        rows += [(shown, t.name, f"{t.seconds:.4g}", "<" if t.binds else "") for t in plan.terms if t.phase == name]
        rows.append((shown, "total", f"{seconds:.4g}", ""))
    return "\n".join([*text, "", *format_table(rows)])


def _limit(count: int) -> str:
    """Format a limit."""
    return "no limit" if count >= 2**60 else format_bytes(count)


def _layer_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return rows for runs of layers that are all kept (bytes) or all recomputed (seconds)."""
    whole = [made.kept for made in plan.layers if not made.name.startswith(ATTENTION_OF)]
    rows: list[tuple[str, ...]] = [
        (f"layers ({sum(whole)} of {len(whole)} kept)", "activations", "bytes", "seconds to recompute")
    ]
    pairs = zip(plan.layers, plan.workload.layers, strict=True)
    for (kept, _), run in groupby(pairs, key=lambda pair: (pair[0].kept, pair[0].name.startswith(ATTENTION_OF))):
        layers = [layer for _, layer in run]
        held, seconds = sum(x.kept_bytes for x in layers), sum(x.recompute_seconds for x in layers)
        rows.append(
            (
                _span([x.name for x in layers]),
                "kept" if kept else "recomputed",
                format_bytes(held),
                f"{seconds:.4g}{' saved' if kept else ''}",
            )
        )
    return rows


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
