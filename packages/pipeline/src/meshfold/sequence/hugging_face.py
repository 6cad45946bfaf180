"""Attention of Hugging Face models, through transformers' registry of attention functions.

Their own masks are never made: at 128K tokens they would take gigabytes. Imports transformers only for models of it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from meshfold.mesh import LayoutError
from meshfold.mesh.tracking import untracked
from meshfold.sequence.attention_call import AttentionSettings

NAME = "meshfold_sequence"
_settings: WeakKeyDictionary[nn.Module, Callable[[], AttentionSettings]] = WeakKeyDictionary()
_UNKNOWN = ("softcap", "position_bias", "s_aux", "head_mask")


def parts(model: nn.Module) -> list[nn.Module]:
    """Return the model, or the largest parts of it, that are Hugging Face models."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model]
    return [found for child in model.children() for found in parts(child)]


_FROM_IDS = "create_position_ids_from_input_ids"


def positions_from_ids(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the function by which a model numbers the tokens of whole sequences itself: ids ``b s`` -> positions ``b s``.

    None for a model that counts tokens from 0. RoBERTa and its relatives count from ``padding_idx + 1``, and leave padding out.
    """
    for module in model.modules():
        kind = type(module)
        makes = getattr(kind, _FROM_IDS, None) or vars(sys.modules.get(kind.__module__, object)).get(_FROM_IDS)
        padding, takes = getattr(module, "padding_idx", None), inspect.signature(module.forward).parameters
        if makes is not None and isinstance(padding, int) and "position_ids" in takes:
            return lambda ids: makes(ids, padding)
    return None


class Registered:
    """Runs the attention of a model's modules over the ranks until it is removed."""

    def __init__(self, model: nn.Module, settings: Callable[[], AttentionSettings]) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)
        self._modules = list(model.modules())
        configs = {id(m.config): m.config for m in self._modules if hasattr(m, "config")}
        self._before = [
            (config, config._attn_implementation)
            for config in configs.values()
            if hasattr(config, "_attn_implementation")
        ]
        for config, _ in self._before:
            config._attn_implementation = NAME
        for module in self._modules:
            _settings[module] = settings

    def remove(self) -> None:
        """Restore the model."""
        for config, before in self._before:
            config._attn_implementation = before
        for module in self._modules:
            _settings.pop(module, None)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend, as the registry of transformers calls it: ``b heads s d`` -> ``b s heads d``."""
    settings = _settings.get(module)
    if settings is None:
        raise LayoutError(
            f"a module {type(module).__name__} has its attention set to {NAME!r}, but is not part of a model that "
            "sequence_parallel was called on: call it on the whole model"
        )
    unknown = [name for name in _UNKNOWN if others.get(name) is not None]
    if unknown:
        raise LayoutError(
            f"{type(module).__name__} needs {', '.join(unknown)}, which attention over a split sequence does not support"
        )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    out = settings().attend(
        query,
        key,
        value,
        masked=attention_mask is not None,
        causal=is_causal,
        window=sliding_window,
        scale=scaling,
        dropout=dropout,
    )
    return out, None


def no_mask(*args: Any, attention_mask: Tensor | None = None, **others: Any) -> None:
    """Return None in place of a mask, and refuse padding masks.

    Raises:
        LayoutError: if the caller masks tokens.
    """
    if attention_mask is None:
        return
    with untracked():
        hides = not bool(attention_mask.all())
    if hides:
        raise LayoutError(
            "attention_mask hides tokens, but attention over a split sequence supports only padding at the end of the whole "
            "sequence: leave attention_mask out, and give sequence_parallel the length without padding"
        )
