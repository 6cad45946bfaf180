"""The optimizer's step on shards: the general way with any elementwise torch optimizer, and our Adam on whole chunks."""

from __future__ import annotations

from meshfold.zero_gemini.stepping.adam import AdamStepper
from meshfold.zero_gemini.stepping.base import EarlyStepper, Entry, Stepper
from meshfold.zero_gemini.stepping.general import GeneralStepper
from meshfold.zero_gemini.stepping.on_disk import DiskSettings

__all__ = ["AdamStepper", "DiskSettings", "EarlyStepper", "Entry", "GeneralStepper", "Stepper"]
