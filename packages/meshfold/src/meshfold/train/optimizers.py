"""The optimizer that a command's arguments name."""

from __future__ import annotations

from typing import Any


def optimizer_settings(name: str, *, lr: float, weight_decay: float) -> dict[str, Any]:
    """Return an optimizer as the engine takes it. Its highest rate is ``lr``: ``adafactor_hf`` takes none relative to the step."""
    relative = {"relative_step": False} if name == "adafactor_hf" else {}
    return dict(name=name, lr=lr, weight_decay=weight_decay, **relative)
