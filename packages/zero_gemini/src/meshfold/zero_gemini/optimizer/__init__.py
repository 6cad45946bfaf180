"""The optimizer's step on shards: the general way with any elementwise torch optimizer, and our Adam on whole chunks."""

from __future__ import annotations

from meshfold.zero_gemini.optimizer.adam import AdamStepper
from meshfold.zero_gemini.optimizer.disk_state import DiskSettings
from meshfold.zero_gemini.optimizer.elementwise import GeneralStepper
from meshfold.zero_gemini.optimizer.interface import EarlyStepper, Entry, Stepper

__all__ = ["AdamStepper", "DiskSettings", "EarlyStepper", "Entry", "GeneralStepper", "Stepper"]
