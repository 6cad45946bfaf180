"""Hugging Face models: folders read and written tensor by tensor under any spec, adapters, four bits, its Trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfold.huggingface.adapter import save_adapter
    from meshfold.huggingface.from_folder import Pretrained, pretrained
    from meshfold.huggingface.trainer import EngineTrainer

__all__ = ["EngineTrainer", "Pretrained", "pretrained", "save_adapter"]

_MODULES = {
    "EngineTrainer": "trainer",
    "Pretrained": "from_folder",
    "pretrained": "from_folder",
    "save_adapter": "adapter",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: transformers takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
