"""Hugging Face models: folders read and written tensor by tensor under any spec, adapters, four bits, its Trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfold.huggingface.adapter import save_adapter
    from meshfold.huggingface.causal_lm import HuggingFaceModel, open_model, silence_transformers
    from meshfold.huggingface.conversion import convert_folder
    from meshfold.huggingface.decoder_configs import own_config
    from meshfold.huggingface.export import save_hugging_face
    from meshfold.huggingface.folder_config import NO_REMOTE_CODE, require_config
    from meshfold.huggingface.folding_folder import FoldingFolder, open_folding, outline_folding
    from meshfold.huggingface.folding_models import FoldingModel
    from meshfold.huggingface.from_folder import Pretrained, pretrained
    from meshfold.huggingface.palm_presets import PALM, palm, palm_config, palm_sizes, rotary_rows
    from meshfold.huggingface.structure import CHAIN_NAMES, Atom, Structure
    from meshfold.huggingface.trainer import EngineTrainer

__all__ = [
    "CHAIN_NAMES",
    "NO_REMOTE_CODE",
    "PALM",
    "Atom",
    "EngineTrainer",
    "FoldingFolder",
    "FoldingModel",
    "HuggingFaceModel",
    "Pretrained",
    "Structure",
    "convert_folder",
    "open_folding",
    "open_model",
    "outline_folding",
    "own_config",
    "palm",
    "palm_config",
    "palm_sizes",
    "pretrained",
    "require_config",
    "rotary_rows",
    "save_adapter",
    "save_hugging_face",
    "silence_transformers",
]

_MODULES = {
    "Atom": "structure",
    "CHAIN_NAMES": "structure",
    "FoldingFolder": "folding_folder",
    "FoldingModel": "folding_models",
    "Structure": "structure",
    "open_folding": "folding_folder",
    "outline_folding": "folding_folder",
    "EngineTrainer": "trainer",
    "HuggingFaceModel": "causal_lm",
    "NO_REMOTE_CODE": "folder_config",
    "PALM": "palm_presets",
    "Pretrained": "from_folder",
    "convert_folder": "conversion",
    "open_model": "causal_lm",
    "own_config": "decoder_configs",
    "palm": "palm_presets",
    "palm_config": "palm_presets",
    "palm_sizes": "palm_presets",
    "rotary_rows": "palm_presets",
    "pretrained": "from_folder",
    "require_config": "folder_config",
    "save_adapter": "adapter",
    "save_hugging_face": "export",
    "silence_transformers": "causal_lm",
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use, since transformers takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
