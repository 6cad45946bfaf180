"""Named shapes, and how to build a model from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, overload

from meshfold.mesh import SpecError, did_you_mean
from meshfold.models.config import DecoderConfig, GPTConfig, LlamaConfig, changed
from meshfold.models.gpt import GPT
from meshfold.models.llama import Llama
from meshfold.models.moe import MoELlamaConfig
from meshfold.models.vit import ViT
from meshfold.models.vit_config import VITS, ViTConfig

PRESETS: dict[str, GPTConfig | LlamaConfig] = {
    "gpt-tiny": GPTConfig(vocab_size=256, hidden=64, layers=2, heads=4, max_positions=128),
    "gpt-small": GPTConfig(vocab_size=256, hidden=256, layers=4, heads=8, max_positions=256),
    "gpt2": GPTConfig(vocab_size=50257, hidden=768, layers=12, heads=12),
    "gpt2-medium": GPTConfig(vocab_size=50257, hidden=1024, layers=24, heads=16),
    "gpt2-large": GPTConfig(vocab_size=50257, hidden=1280, layers=36, heads=20),
    "gpt2-xl": GPTConfig(vocab_size=50257, hidden=1600, layers=48, heads=25),
    "gpt-10b": GPTConfig(vocab_size=50304, hidden=4096, layers=50, heads=16),
    "gpt-175b": GPTConfig(vocab_size=50304, hidden=12288, layers=96, heads=96, max_positions=2048),
    "llama-tiny": LlamaConfig(vocab_size=256, hidden=64, layers=2, heads=4, kv_heads=2, ffn=192, max_positions=128),
    "llama-small": LlamaConfig(vocab_size=256, hidden=256, layers=4, heads=8, kv_heads=4, ffn=704, max_positions=256),
    "llama-1b": LlamaConfig(
        vocab_size=128256,
        hidden=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        ffn=8192,
        max_positions=8192,
        rope_theta=500000.0,
        tie=True,
    ),
    "llama-8b": LlamaConfig(
        vocab_size=128256,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        ffn=14336,
        max_positions=8192,
        rope_theta=500000.0,
    ),
    "llama-70b": LlamaConfig(
        vocab_size=128256,
        hidden=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        ffn=28672,
        max_positions=8192,
        rope_theta=500000.0,
    ),
    "llama-moe-tiny": MoELlamaConfig(
        vocab_size=256, hidden=64, layers=2, heads=4, kv_heads=2, ffn=96, experts=8, top_k=2, max_positions=128
    ),
    "mixtral-8x7b": MoELlamaConfig(
        vocab_size=32000,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        ffn=14336,
        experts=8,
        top_k=2,
        max_positions=32768,
        rope_theta=1000000.0,
        balance=0.02,
    ),
}
"""``*-tiny`` and ``*-small`` are for bytes on a laptop; the rest are the published shapes."""


def preset(name: str, **changes: Any) -> GPTConfig | LlamaConfig:
    """Return the named configuration, with some fields changed: ``preset("gpt-tiny", layers=4)``.

    Raises:
        SpecError: for an unknown name or field, a model of images, or sizes that do not fit together.
    """
    if name in VITS:
        raise SpecError(f"model {name!r} takes images, not tokens: write build(vit_preset({name!r}))")
    if name not in PRESETS:
        raise SpecError(f"there is no model {name!r}.{did_you_mean(str(name), PRESETS)} Known: {', '.join(PRESETS)}")
    return changed(name, PRESETS[name], changes)


_MODELS: Mapping[type[Any], Callable[[Any], GPT | Llama | ViT]] = {GPTConfig: GPT, LlamaConfig: Llama, ViTConfig: ViT}


@overload
def build(config: ViTConfig, **changes: Any) -> ViT: ...
@overload
def build(config: DecoderConfig | str, **changes: Any) -> GPT | Llama: ...
def build(config: DecoderConfig | ViTConfig | str, **changes: Any) -> GPT | Llama | ViT:
    """Return the model of a configuration, or of a preset's name, with some fields changed.

    Raises:
        SpecError: for an unknown name or field.
    """
    found = preset(config, **changes) if isinstance(config, str) else replace(config, **changes)
    for kind, model in _MODELS.items():
        if isinstance(found, kind):
            return model(found)
    raise SpecError(f"{type(found).__name__} is no GPTConfig, LlamaConfig or ViTConfig: there is no model for it")
