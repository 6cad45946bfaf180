"""A table of folding options as text, numbers and a picture, with the lines to paste."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshfold.mesh import SpecError
from meshfold.mesh.spec import format_bytes, format_table
from meshfold.planner.folding.options import FoldingOption, FoldingTable
from meshfold.planner.report import format_seconds


def folding_text(found: FoldingTable) -> str:
    """Return the table: whether it fits, bytes, layout, chunks and recomputation, seconds."""
    does = "forward, backward and optimizer" if found.training else "a pass at inference"
    msa = f", {found.sequences:,} sequences" if found.sequences > 1 else ""
    batch = f", {found.batch} proteins" if found.batch > 1 else ""
    head = (
        f"{found.outline.name}: {len(found.outline.stack.blocks)} blocks{msa}{batch}, {found.precision}, {does}; "
        f"{format_bytes(found.machine.memory)} a GPU of {found.machine.name}"
    )
    rows: list[tuple[str, ...]] = [
        ("residues", "GPUs", "fits", "a GPU holds", "seconds", "layout", "chunks and recomputation")
    ]
    for one in found.options:
        took = format_seconds(one.seconds) if one.fits else "-"
        settings = str(one.plan.settings) if one.fits else f"least: {one.plan.settings}"
        rows.append(
            (
                f"{one.residues:,}",
                str(one.gpus),
                "yes" if one.fits else "no",
                format_bytes(one.plan.bytes),
                took,
                one.plan.run.ranks,
                settings,
            )
        )
    return "\n".join([head, "", *format_table(rows, ">>>>><<")])


def lines_to_paste(option: FoldingOption, *, folds: bool = False) -> str:
    """Return the lines that run an option: of a script with an engine, without one, and of ``meshfold fold``.

    Args:
        option: one that fits.
        folds: the model can be run by ``meshfold fold``.
    """
    axes, mode = option.plan.run.axes, option.plan.run.mode.name
    memory = size_to_paste(option.stack_limit)
    lines = []
    if option.gpus > 1:
        sizes = f"size={option.gpus}" if mode == "dap" else f"mode='grid', rows={axes['row']}, columns={axes['col']}"
        lines.append(f"parallel = dict(axial=dict({sizes}, memory='{memory}'))")
    words = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    lines.append(f"parallelize_folding(model, Mesh(dict({words})), {mode!r}, memory='{memory}')")
    if folds and not option.plan.run.training:
        layout = "" if mode == "dap" else f" --axial {axes['row']}x{axes['col']}"
        limit = option.plan.bytes if option.plan.limit is None else option.plan.limit
        lines.append(
            f"meshfold fold --model DIR --ranks {option.gpus}{layout} --memory {size_to_paste(limit)} --precision bf16"
        )
    return "\n".join(lines)


def longest_that_fits(found: FoldingTable) -> FoldingOption | None:
    """Return the option with the most residues that fits, on the fewest GPUs; None if none fits."""
    fitting = [one for one in found.options if one.fits]
    return max(fitting, key=lambda one: (one.residues, -one.gpus), default=None)


def folding_numbers(found: FoldingTable) -> dict[str, Any]:
    """Return a table as numbers for JSON."""
    return {
        "model": found.outline.name,
        "machine": found.machine.name,
        "gpu_memory": int(found.machine.memory),
        "sequences": found.sequences,
        "batch_size": found.batch,
        "precision": found.precision,
        "training": found.training,
        "options": [_numbers(one) for one in found.options],
    }


def _numbers(one: FoldingOption) -> dict[str, Any]:
    settings, times = one.plan.settings, one.times
    return {
        "residues": one.residues,
        "gpus": one.gpus,
        "fits": one.fits,
        "bytes": one.plan.bytes,
        "mode": one.plan.run.mode.name,
        "axes": dict(one.plan.run.axes),
        "chunk_bytes": settings.chunk_bytes,
        "recompute": settings.recompute,
        "stack_memory": one.stack_limit if one.fits else None,
        "seconds": None
        if times is None
        else {
            "compute": times.compute,
            "collectives": times.tensor,
            "gradients": times.data,
            "optimizer": times.optimizer,
            "step": times.overlapped,
        },
    }


def draw_folding(found: FoldingTable, path: str | Path) -> None:
    """Draw bytes of a GPU against residues, a line for each number of GPUs; a file ``.svg`` or ``.png``.

    Filled marks run whole; open ones in chunks or with recomputation; crosses do not fit.

    Raises:
        SpecError: if Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SpecError("pictures need Matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, gpus in enumerate(dict.fromkeys(one.gpus for one in found.options)):
        colour = f"C{number}"
        line = [one for one in found.options if one.gpus == gpus]
        label = f"{gpus} GPU{'s' * (gpus > 1)}"
        axes.plot([one.residues for one in line], [one.plan.bytes / 2**30 for one in line], color=colour, label=label)
        for one in line:
            whole = one.plan.settings.chunk_bytes is None and one.plan.settings.recompute == "none"
            axes.plot(
                [one.residues],
                [one.plan.bytes / 2**30],
                marker="o" if one.fits else "x",
                color=colour,
                fillstyle="full" if whole else "none",
            )
    limit = found.machine.memory / 2**30
    axes.axhline(limit, color="tab:red", lw=1, ls="--", label=f"{limit:.0f} GiB of {found.machine.name}")
    lengths = sorted({one.residues for one in found.options})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="residues", ylabel="GiB a GPU", title=found.outline.name)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path)


def size_to_paste(count: int) -> str:
    """Return bytes as a spec reads them, rounded down: ``"71680MiB"``, and below 1 GiB ``"2048KiB"``."""
    return f"{count >> 20}MiB" if count >= 1 << 30 else f"{count >> 10}KiB"
