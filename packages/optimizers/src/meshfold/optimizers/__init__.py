"""Optimizers in plain torch that declare their view of a tensor: elements, norms, sums over dims, or all of it."""

from __future__ import annotations

from meshfold.optimizers.adafactor import Adafactor, AdafactorHF
from meshfold.optimizers.averages import AVERAGE, averaged
from meshfold.optimizers.base import MatrixOptimizer, NormOptimizer, Sight, SquareSums, TensorOptimizer, square_sums
from meshfold.optimizers.blocks import Blocks, Product, SumOver, WholeTensors
from meshfold.optimizers.came import Came
from meshfold.optimizers.galore import GaLoreAdafactor, GaLoreAdamW
from meshfold.optimizers.in_backward import step_in_backward
from meshfold.optimizers.lamb import Lamb
from meshfold.optimizers.lars import Lars
from meshfold.optimizers.lion import Lion
from meshfold.optimizers.muon import Muon
from meshfold.optimizers.newton_schulz import orthogonalize
from meshfold.optimizers.roles import ROLES, role_groups, roles_of
from meshfold.optimizers.settings import OptimizerSettingError

__all__ = [
    "AVERAGE",
    "ROLES",
    "Adafactor",
    "AdafactorHF",
    "Blocks",
    "Came",
    "GaLoreAdafactor",
    "GaLoreAdamW",
    "Lamb",
    "Lars",
    "Lion",
    "MatrixOptimizer",
    "Muon",
    "NormOptimizer",
    "OptimizerSettingError",
    "Product",
    "Sight",
    "SquareSums",
    "SumOver",
    "TensorOptimizer",
    "WholeTensors",
    "averaged",
    "orthogonalize",
    "role_groups",
    "roles_of",
    "square_sums",
    "step_in_backward",
]
