"""Two families of decoders, GPT and Llama-like, as plain PyTorch modules that know nothing of parallelism.

To code that shards them, ``flat_tokens = True`` says that the residual stream is ``m h``, with m
the tokens of all sequences one behind the other, so that any split of m is a split of rows. To code that generates
text, ``caches_keys = True`` says that only their :class:`~meshfold.models.attention.Attention` mixes tokens, one in
each of ``blocks``, and that ``position_ids`` tells them where tokens stand whose past it has kept.
"""

from __future__ import annotations

from meshfold.mesh import redirect_imports
from meshfold.models.config import DecoderConfig, GPTConfig, LlamaConfig
from meshfold.models.generate import attention_layers, attention_window, generate
from meshfold.models.gpt import GPT
from meshfold.models.llama import Llama
from meshfold.models.loss import CausalLMLoss, CausalLMOutput
from meshfold.models.moe import MoELlamaConfig
from meshfold.models.presets import PRESETS, build, preset

__all__ = [
    "GPT",
    "PRESETS",
    "CausalLMLoss",
    "CausalLMOutput",
    "DecoderConfig",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "MoELlamaConfig",
    "attention_layers",
    "attention_window",
    "build",
    "generate",
    "preset",
]

redirect_imports({"meshfold.models.visible": "meshfold.models.attention"})
