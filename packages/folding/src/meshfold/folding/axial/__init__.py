"""Axial layouts: how pair and MSA tensors are split over ranks, and the collectives that follow."""

from __future__ import annotations

from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.modes import AXIAL_MODES, AxialMode, find_axial_mode
from meshfold.folding.axial.product import product_plan

__all__ = ["AXIAL_MODES", "WHOLE", "Axes", "AxialMode", "find_axial_mode", "product_plan"]
