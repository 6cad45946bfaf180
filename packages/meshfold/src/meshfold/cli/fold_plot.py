"""A picture of how sure a folding model is: pLDDT by residue, and the matrix of predicted aligned errors."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from meshfold.huggingface import Structure

BANDS = ((0, 50, "#ff7d45"), (50, 70, "#ffdb13"), (70, 90, "#65cbf3"), (90, 100, "#0053d6"))
"""Bands of pLDDT, with the colours of the AlphaFold database: very low, low, confident, very high."""


def plot_confidence(path: Path, structure: Structure, title: str) -> None:
    """Write the picture as a PNG; needs matplotlib. See :func:`confidence_figure`."""
    confidence_figure(structure, title).savefig(path)


def confidence_figure(structure: Structure, title: str) -> Figure:
    """Draw the picture. Residues are numbered through all chains; dashed lines mark where a chain ends.

    Args:
        structure: what was predicted.
        title: above the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display and no pyplot state
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from meshfold.huggingface import CHAIN_NAMES

    residues = len(structure.plddt)
    figure = Figure(figsize=(6, 9), dpi=120, layout="constrained")  # fits a phone
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    curve, matrix = figure.subplots(2, 1, height_ratios=(2, 3))
    for low, high, colour in BANDS:
        curve.axhspan(low, high, color=colour, alpha=0.25, linewidth=0)
    numbers = range(1, residues + 1)
    curve.plot(numbers, structure.plddt.tolist(), color="black", linewidth=1.2, marker="." if residues < 50 else "")
    curve.set(xlabel="residue", ylabel="pLDDT (0 to 100)", ylim=(0, 100), xlim=(0.5, residues + 0.5))
    extent = (0.5, residues + 0.5, residues + 0.5, 0.5)
    errors = matrix.imshow(
        structure.pae.tolist(), cmap="Greens_r", vmin=0, vmax=30, extent=extent, interpolation="nearest"
    )
    matrix.set(xlabel="scored residue", ylabel="aligned residue")
    figure.colorbar(errors, ax=matrix, label="predicted aligned error (Å)", extend="max")
    ends = list(accumulate(map(len, structure.chains)))
    for name, first, end in zip(CHAIN_NAMES, [0, *ends], ends, strict=False):
        if len(ends) > 1:
            curve.text((first + end + 1) / 2, 3, name, ha="center", fontweight="bold", color="black")
        if end < residues:
            curve.axvline(end + 0.5, color="black", linestyle="--", linewidth=1)
            matrix.axvline(end + 0.5, color="black", linestyle="--", linewidth=1)
            matrix.axhline(end + 0.5, color="black", linestyle="--", linewidth=1)
    for axis in (curve.xaxis, matrix.xaxis, matrix.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    return figure
