"""GPT, Llama-like decoders and vision transformers, as plain PyTorch modules that know nothing of parallelism.

For code that shards them, ``flat_tokens = True`` says that the residual stream is ``m h``. m are the tokens of all sequences, one
sequence after the other, so any split of m is a split of rows. For code that generates text, ``caches_keys = True`` says two
things. Only :class:`~meshfold.models.attention.Attention` mixes tokens, one in each of ``blocks``. ``position_ids`` gives the
positions of tokens whose past it has kept.
"""

from __future__ import annotations

from meshfold.mesh import redirect_imports
from meshfold.models.calls import ModelCalls
from meshfold.models.config import DecoderConfig, GPTConfig, LlamaConfig
from meshfold.models.generate import attention_layers, attention_window, generate
from meshfold.models.gpt import GPT
from meshfold.models.llama import Llama
from meshfold.models.loss import CausalLMLoss, CausalLMOutput
from meshfold.models.moe import MoELlamaConfig
from meshfold.models.presets import PRESETS, build, preset
from meshfold.models.routing import head_of, routed, unrouted_reason
from meshfold.models.vit import ImageClasses, ViT
from meshfold.models.vit_config import VITS, ViTConfig, vit_preset

__all__ = [
    "GPT",
    "PRESETS",
    "VITS",
    "CausalLMLoss",
    "CausalLMOutput",
    "DecoderConfig",
    "GPTConfig",
    "ImageClasses",
    "Llama",
    "LlamaConfig",
    "MoELlamaConfig",
    "ModelCalls",
    "ViT",
    "ViTConfig",
    "attention_layers",
    "attention_window",
    "build",
    "generate",
    "head_of",
    "preset",
    "routed",
    "unrouted_reason",
    "vit_preset",
]

redirect_imports({"meshfold.models.visible": "meshfold.models.attention"})
