"""Tiny models, specs and batches with unequal lengths for the tests of alignment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig

WORDS = 37
SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "zero 3": dict(data=2, zero=dict(stage=3)),
    "tensor": dict(tensor=2),
    "pipeline": dict(pipeline=dict(size=2, microbatches=2)),
    "sequence": dict(sequence=dict(mode="ring", size=2)),
}
"""on two ranks"""
SPECS_OF_4: dict[str, dict[str, Any]] = {
    "2d": dict(tensor=dict(mode="2d", size=4)),
    "2.5d": dict(tensor=dict(mode="2.5d", size=4, depth=4)),
    "3d": dict(tensor=dict(mode="3d", grid=(2, 2, 1))),
    "data and pipeline": dict(data=2, pipeline=dict(size=2, microbatches=2)),
    "zero 3 and tensor": dict(data=2, tensor=2, zero=dict(stage=3)),
    "ulysses and data": dict(data=2, sequence=dict(mode="ulysses", size=2)),
}


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=WORDS, hidden=16, layers=2, heads=2, max_positions=24))


def llama() -> Llama:
    return Llama(LlamaConfig(vocab_size=WORDS, hidden=16, layers=2, heads=2, kv_heads=2))


def hugging_face(vocab_size: int = WORDS) -> nn.Module:
    """A tiny Llama of transformers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def plain_log_probs(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels at their own places, and entropies, from whole logits."""
    given = {name: batch[name] for name in ("position_ids",) if name in batch}
    logits = model(batch["input_ids"], **given).logits
    logs = torch.log_softmax(logits, -1)
    labels = batch["labels"]
    counts = labels != -100
    chosen = logs[:, :-1].gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    entropy = -(logs.exp() * logs).sum(-1)[:, :-1]
    return tuple(F.pad(torch.where(counts[:, 1:], x, 0.0), (1, 0)) for x in (chosen, entropy))  # type: ignore[return-value]


def masked_batch(rows: int = 5, length: int = 12, seed: int = 0) -> dict[str, Any]:
    """Rows whose labels count at very different numbers of tokens, one of them at none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : [3, 9, 11, 1, 6, 10, 2, 7][row % 8]] = -100
    labels[1:2] = -100
    return dict(input_ids=ids, labels=labels)
