"""The optimizer's step on shards: with any elementwise torch optimizer, and with our Adam on whole chunks."""

from __future__ import annotations

from meshfold.zero_gemini.optimizer.adam import AdamStepper
from meshfold.zero_gemini.optimizer.disk_state import DiskSettings
from meshfold.zero_gemini.optimizer.dispatch import (
    OptimizerKind,
    StateSize,
    optimizer_kind,
    state_size,
    steps_early,
)
from meshfold.zero_gemini.optimizer.elementwise import GeneralStepper
from meshfold.zero_gemini.optimizer.gpu_streaming import STREAMING_BYTES
from meshfold.zero_gemini.optimizer.interface import EarlyStepper, Entry, Stepper
from meshfold.zero_gemini.optimizer.kernel_runs import StepKind, StepTiming
from meshfold.zero_gemini.optimizer.owned_state import owned_state_size
from meshfold.zero_gemini.optimizer.speculative_steps import SPECULATE_AFTER_STEPS

__all__ = [
    "SPECULATE_AFTER_STEPS",
    "STREAMING_BYTES",
    "AdamStepper",
    "DiskSettings",
    "EarlyStepper",
    "Entry",
    "GeneralStepper",
    "OptimizerKind",
    "StateSize",
    "StepKind",
    "StepTiming",
    "Stepper",
    "optimizer_kind",
    "owned_state_size",
    "state_size",
    "steps_early",
]
