"""Small models whose greedy texts vary, and transformers' texts for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WORDS, LONGEST = 61, 48
IDS: dict[str, Any] = dict(vocab_size=WORDS, bos_token_id=None, eos_token_id=None, pad_token_id=None)
BODY: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=LONGEST)
LLAMA: dict[str, Any] = dict(**IDS, **BODY, intermediate_size=48, num_key_value_heads=2)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", dict(**LLAMA, head_dim=16)),
    "mistral": ("MistralForCausalLM", dict(**LLAMA, sliding_window=5)),
    "mixtral": ("MixtralForCausalLM", dict(**LLAMA, num_local_experts=4, num_experts_per_tok=2)),
    "opt": (
        "OPTForCausalLM",
        dict(**IDS, **BODY, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, tie_word_embeddings=False),
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        dict(**IDS, n_embd=32, n_layer=2, n_head=4, n_positions=LONGEST, tie_word_embeddings=False),
    ),
}
"""Class and sizes of transformers' models."""


def hugging_face(kind: str, **changes: Any) -> Any:
    import transformers

    name, sizes = FAMILIES[kind]
    made = getattr(transformers, name)
    torch.manual_seed(0)
    return varied(made(made.config_class(**{**sizes, **changes})).eval())


def own(kind: str, config: Any = None, **changes: Any) -> Any:
    """Return a model of ours; ``config``: the class of a Llama's."""
    from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=WORDS, hidden=32, layers=2, heads=4, max_positions=LONGEST, tie=False)
    if kind == "gpt":
        return varied(GPT(GPTConfig(**{**sizes, **changes})))
    return varied(Llama((config or LlamaConfig)(**{**sizes, "kv_heads": 2, "ffn": 48, **changes})))


def varied(model: nn.Module) -> Any:
    """With weights so large that tokens depend on those before them."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * (0.25 if weight.shape[-1] == 32 else 0.15))
            if "embed" in name or "wte" in name or "head" in name:
                weight.mul_(4)
    return model


def prompts(count: int, longest: int = 12, seed: int = 1) -> list[list[int]]:
    """Prompts of different lengths, some of which begin alike."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        length = int(torch.randint(1, longest + 1, (), generator=random))
        ids = torch.randint(3, WORDS, (length,), generator=random).tolist()
        found.append(ids if i % 3 or not found else [*found[0], *ids][:longest])
    return found


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The likeliest next tokens: transformers' generate, or a forward of everything for each."""
    if hasattr(model, "generate"):
        out: Tensor = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
        return out[0, len(prompt) :].tolist()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    return ids[0, len(prompt) :].tolist()
