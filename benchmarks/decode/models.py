"""Models of `meshfold bench decode`: Llamas of one shape, ours and transformers'."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def own_model(options: argparse.Namespace) -> Any:
    """Return our Llama with random weights; on several ranks what generates with the part of it that is here."""
    from meshfold.models import LlamaConfig, build

    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        ffn=options.ffn,
        max_positions=options.prompt + options.new + 1,
        tie=False,
    )
    if options.ranks == 1:
        return made_here(lambda: build(config), options)
    from meshfold.engine import Engine

    precision = "bf16" if options.dtype == "bfloat16" else "fp32"
    torch.manual_seed(0)
    engine = Engine(lambda: build(config), dict(tensor=options.ranks), precision=precision)
    model = engine.generator.eval()
    model.engine_of_ranks = [engine]  # lives as long as the model, and is no part of its state
    return model


def their_model(options: argparse.Namespace) -> Any:
    """Return transformers' Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        intermediate_size=options.ffn,
        max_position_embeddings=options.prompt + options.new + 1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return made_here(lambda: LlamaForCausalLM(config), options)


def made_here(make: Callable[[], nn.Module], options: argparse.Namespace) -> nn.Module:
    """Return a model in eval mode, made on the GPU where there is one, in the wanted dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, options.dtype))
    torch.manual_seed(0)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return make().eval()
    finally:
        torch.set_default_dtype(before)


def weight_bytes(options: argparse.Namespace) -> int:
    """Return the bytes of the weights that every token reads: all but the embedding table."""
    head = options.hidden // options.heads
    block = options.hidden * (2 * options.heads + 2 * options.kv_heads) * head + 3 * options.hidden * options.ffn
    wide: int = getattr(torch, options.dtype).itemsize
    return int(options.layers * block + options.hidden * options.vocabulary) * wide
