"""Tiny models of transformers with experts, and a reference of a mixture in a loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

EXPERTS, TOP_K, HIDDEN, FFN = 8, 2, 16, 24
COMMON = dict(
    vocab_size=64,
    hidden_size=HIDDEN,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    num_experts_per_tok=TOP_K,
)
# family: configuration's name, model's name, further settings
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", dict(num_local_experts=EXPERTS, intermediate_size=FFN)),
    "qwen2": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        dict(num_experts=EXPERTS, moe_intermediate_size=FFN, shared_expert_intermediate_size=32),
    ),
    "qwen3": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        dict(num_experts=EXPERTS, moe_intermediate_size=FFN, head_dim=8, norm_topk_prob=True),
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", dict(num_experts=EXPERTS, intermediate_size=FFN)),
    "deepseek": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        dict(
            n_routed_experts=EXPERTS,
            moe_intermediate_size=FFN,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=None,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        dict(num_local_experts=EXPERTS, intermediate_size=FFN, head_dim=8, sliding_window=16),
    ),
}
# What tensor parallelism does not split: latent attention, and parameters of attention itself.
WHOLE_ATTENTION = {family: {"*.self_attn": "replicate"} for family in ("deepseek", "gpt-oss")}


def model_of(family: str, *, eager: bool = True) -> Any:
    """Return a tiny model in float64 with random parameters; ``eager``: its experts run in a loop."""
    import transformers

    config_name, model_name, more = FAMILIES[family]
    settings = {**COMMON, **more}
    torch.manual_seed(1)
    config = getattr(transformers, config_name)(**settings)
    config._attn_implementation = "eager"
    if eager:
        config._experts_implementation = "eager"
    model = getattr(transformers, model_name)(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
    return model


def plain_mixture(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, kept: Tensor | None = None
) -> Tensor:
    """Return the weighted sum of gated SiLU experts, token by token: differentiable, slow and plain."""
    outputs = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for j in range(index.shape[1]):
            if kept is not None and not kept[t, j]:
                continue
            gate, up = (gate_up[index[t, j]] @ x[t]).chunk(2)
            total = total + weights[t, j] * (down[index[t, j]] @ (nn.functional.silu(gate) * up))
        outputs.append(total)
    return torch.stack(outputs) if outputs else torch.zeros_like(x)


def close(found: Tensor | None, expected: Tensor, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    """Assert that tensors are equal but for rounding. (torch.testing's takes a second for its imports, on every rank.)"""
    assert found is not None and found.shape == expected.shape and found.dtype is expected.dtype
    excess = (found - expected).abs() - rtol * expected.abs() - atol
    assert found.numel() == 0 or float(excess.detach().max()) <= 0, f"off by {float(excess.detach().max()):.3g} more"
