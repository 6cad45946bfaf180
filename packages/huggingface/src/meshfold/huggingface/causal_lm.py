"""Hugging Face causal language models from a local folder, with weights or without."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshfold.checkpoint.tensors import has_weights
from meshfold.huggingface.folder_config import read_config, require_config
from meshfold.huggingface.from_folder import Pretrained, pretrained
from meshfold.mesh import SpecError


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A model that a folder describes.

    Attributes:
        folder: where.
        config: transformers' configuration.
        has_weights: whether the folder has weights too.
    """

    folder: Path
    config: Any
    has_weights: bool

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence in tokens, if the configuration names one."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return None if found is None else int(found)

    def build(self) -> nn.Module:
        """Return the model with fresh weights; pass this function to the engine, which never allocates the whole."""
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32, trust_remote_code=False)
        return model

    def load(self) -> Pretrained:
        """Return the model with the folder's weights, which an engine reads straight into place.

        Raises:
            SpecError: if they are damaged.
        """
        return pretrained(self.folder, model_class="AutoModelForCausalLM")

    @property
    def source(self) -> Callable[[], nn.Module]:
        """The model argument for the engine: weights of the folder if it has any, else the function that builds the
        model."""
        return self.load() if self.has_weights else self.build


def open_model(folder: str | os.PathLike[str]) -> HuggingFaceModel:
    """Read a folder's ``config.json`` and look for weights next to it. Nothing is downloaded.

    Raises:
        SpecError: if there is no configuration of a causal language model, or transformers is not installed.
    """
    require_config(folder)
    path, name = Path(folder), str(folder)
    config = read_config(path, f"model {name!r}")
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SpecError(
            f"model {name!r} is of type {config.model_type!r}, which has no causal language model in transformers"
        )
    config.use_cache = False
    return HuggingFaceModel(folder=path, config=config, has_weights=has_weights(path))


def silence_transformers() -> None:
    """Make transformers print only errors, on ranks whose warnings another rank prints."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
