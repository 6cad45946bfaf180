"""Drawing of a plan's timeline. Imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from meshfold.zero_gemini.planner.memory import KINDS
from meshfold.zero_gemini.planner.rates import GiB, KiB, MiB
from meshfold.zero_gemini.planner.result import Plan
from meshfold.zero_gemini.planner.timeline import Timestep

_PALETTE = ("#bab0ac", "#f28e2b", "#4e79a7", "#4fb0ab", "#59a14f", "#b07aa1")
_INK, _FAINT, _LIMIT = "#777777", "#808080", "#e15759"  # legible on white and on dark pages


def formats() -> set[str]:
    """Return the file endings that can be written."""
    return set(FigureCanvasAgg.get_supported_filetypes())


def timeline_figure(plan: Plan, timesteps: Sequence[Timestep]) -> Figure:
    """Draw stacked bytes by kind at every timestep, the limit as a line, and the turn from forward to backward."""
    figure = Figure(figsize=(5.4, 4.6), dpi=150, facecolor="none", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.tick_params(colors=_INK)
    axes.spines[:].set_color(_INK)
    limit = plan.limits.as_tuple()[0]
    unit, name = next(((u, n) for u, n in ((GiB, "GiB"), (MiB, "MiB")) if limit >= u), (KiB, "KiB"))
    edges = [timestep.index - 0.5 for timestep in timesteps] + [timesteps[-1].index + 0.5]
    base = [0.0] * len(timesteps)
    for kind, color in zip(KINDS, _PALETTE, strict=True):
        top = [below + timestep.kinds[kind] / unit for below, timestep in zip(base, timesteps, strict=True)]
        if top != base:
            axes.stairs(top, edges, baseline=base, fill=True, color=color, label=kind)
        base = top
    axes.axhline(limit / unit, color=_LIMIT, linewidth=1.2, label="limit")
    axes.axvline(plan.workload.forward_timesteps - 0.5, color=_FAINT, linewidth=0.8, linestyle=":")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1.05 * max(limit / unit, max(base)))
    axes.set_xlabel("units in order: forward, then backward", color=_INK)
    axes.set_ylabel(f"{name} on the GPU", color=_INK)
    binding = "; ".join(plan.binding)
    axes.set_title(f"{plan.workload.name}: {plan.seconds:.3g} s a step\n{binding}", color=_INK, fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=_INK)
    return figure
