"""The picture of a folding model's confidence, as ``meshfold fold`` draws it, of numbers that are made up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from matplotlib import rc_context

from meshfold.cli.fold_plot import confidence_figure
from meshfold.huggingface import Structure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = (60, 40)


def made_up() -> Structure:
    """Return two chains with a loop in each, and an interface that is not sure."""
    residues = torch.arange(sum(LENGTHS), dtype=torch.float32)
    middles = torch.tensor([0.0, 34.0, 60.0, 99.0]).unsqueeze(1)
    loops = torch.exp(-(((residues - middles) / 5) ** 2)).sum(0)
    doubt = 8 * (loops.unsqueeze(0) + loops.unsqueeze(1)) / 2
    chain = (residues >= LENGTHS[0]).float()
    apart = (chain.unsqueeze(0) - chain.unsqueeze(1)).abs()
    far = (residues.unsqueeze(0) - residues.unsqueeze(1)).abs()
    return Structure(
        chains=tuple("A" * length for length in LENGTHS),
        residue_names=("ALA",) * sum(LENGTHS),
        atoms=(),
        plddt=93 - 38 * loops + 2 * torch.sin(residues),
        pae=1.5 + doubt + 12 * apart + far.sqrt() * (1 - apart) * 0.4,
        ptm=0.78,
        iptm=0.55,
    )


def description() -> str:
    """Return what the picture shows, in words."""
    found = made_up()
    return f"confidence of {LENGTHS} residues: pLDDT {found.mean_plddt:.1f}, PAE {float(found.pae.mean()):.1f}"


def draw() -> Figure:
    """Return the picture, with a ground and an ink for white pages and dark ones."""
    from meshfold.tensor_parallel.plot.paint import INK

    ink: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    )
    with rc_context({"figure.facecolor": "none", **ink}):
        return confidence_figure(made_up(), "complex: pLDDT 82.5, pTM 0.78, ipTM 0.55 (made-up numbers)")
