"""Two families of decoders, GPT and Llama-like, as plain PyTorch modules that know nothing of parallelism.

They keep one promise to whoever shards them: ``flat_tokens = True`` says that the residual stream is ``m h``, with m
the tokens of all sequences one behind the other, so that any split of m is a split of rows. And one to whoever generates
text: ``caches_keys = True`` says that only their :class:`~meshfold.engine.models.attention.Attention` mixes tokens, one in
each of ``blocks``, and that ``position_ids`` tells them where tokens stand whose past it has kept.
"""

from __future__ import annotations

from meshfold.engine.models.config import GPTConfig, LlamaConfig
from meshfold.engine.models.generate import generate
from meshfold.engine.models.gpt import GPT
from meshfold.engine.models.llama import Llama
from meshfold.engine.models.loss import CausalLMLoss
from meshfold.engine.models.output import CausalLMOutput
from meshfold.engine.models.presets import PRESETS, build, preset

__all__ = [
    "GPT",
    "PRESETS",
    "CausalLMLoss",
    "CausalLMOutput",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "build",
    "generate",
    "preset",
]
