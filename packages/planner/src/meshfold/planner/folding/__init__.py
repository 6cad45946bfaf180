"""Folding models over numbers of residues and of GPUs: what fits, with which chunks and layout, and how long it takes."""

from __future__ import annotations

from meshfold.planner.folding.options import FoldingOption, FoldingTable, layouts, plan_folding
from meshfold.planner.folding.report import (
    draw_folding,
    folding_numbers,
    folding_text,
    lines_to_paste,
    longest_that_fits,
)

__all__ = [
    "FoldingOption",
    "FoldingTable",
    "draw_folding",
    "folding_numbers",
    "folding_text",
    "layouts",
    "lines_to_paste",
    "longest_that_fits",
    "plan_folding",
]
