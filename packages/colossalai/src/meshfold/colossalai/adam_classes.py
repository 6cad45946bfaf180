"""HybridAdam and CPUAdam under Colossal-AI's names, with its arguments; they need meshfold-zero-gemini."""

from __future__ import annotations

from typing import Any

import meshfold.zero_gemini as ours
from meshfold.colossalai.arguments import Translation
from meshfold.colossalai.tables import LOSS_SCALE
from meshfold.zero_gemini.optimizers import FlatAdam


class _Taking(FlatAdam):
    """Optimizer with arguments in Colossal-AI's order; also takes those that Colossal-AI ignored, such as ``initial_scale``."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **others: Any,
    ) -> None:
        ours = {name: others.pop(name) for name in ("regime", "seed") if name in others}
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            adamw_mode=adamw_mode,
            nvme_offload_fraction=nvme_offload_fraction,
            nvme_offload_dir=nvme_offload_dir,
            **ours,
        )
        words = [
            f"{name}={value!r} does nothing"
            + (": the plugin or the config says the loss scale" if name in LOSS_SCALE else "")
            for name, value in others.items()
        ]
        Translation(words=words).say(type(self).__name__)


class HybridAdam(_Taking, ours.HybridAdam):
    """See :class:`meshfold.zero_gemini.HybridAdam`."""


class CPUAdam(_Taking, ours.CPUAdam):
    """See :class:`meshfold.zero_gemini.CPUAdam`."""
