"""Configurations of our own GPT and Llama, and the ``config.json`` of Hugging Face's models that compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshfold.checkpoint import CheckpointError
from meshfold.mesh import SpecError
from meshfold.models import DecoderConfig, GPTConfig, LlamaConfig, MoELlamaConfig

OWN: dict[str, type[DecoderConfig]] = {config.kind: config for config in (GPTConfig, LlamaConfig, MoELlamaConfig)}
"""Those that checkpoints describe, by kind."""


def own_config(described: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of ours that a checkpoint has kept."""
    try:
        return OWN[described["kind"]](**described["config"])
    except (KeyError, TypeError, SpecError) as error:
        raise CheckpointError(f"the checkpoint's description of its model cannot be read: {error}") from error


def theirs_of(config: DecoderConfig) -> dict[str, Any]:
    """Return the ``config.json`` of a model of ours.

    Raises:
        CheckpointError: if transformers' model would compute something else.
    """
    if isinstance(config, GPTConfig):
        return _gpt2_of(config)
    if not isinstance(config, LlamaConfig):
        raise CheckpointError(
            f"a {type(config).__name__} has no config.json of transformers: only {GPTConfig.__name__} and {LlamaConfig.__name__} do"
        )
    return {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie,
        **_llama_class_of(config),
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.d,
        "intermediate_size": config.inner,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _gpt2_of(config: GPTConfig) -> dict[str, Any]:
    """Return the ``config.json`` of a GPT of ours, which is GPT-2."""
    if config.window is not None:
        raise CheckpointError(f"GPT-2 of transformers has no sliding window, and this model has window={config.window}")
    if config.n_kv_heads != config.heads or config.heads * config.d != config.hidden:
        raise CheckpointError(
            f"GPT-2 of transformers has as many key/value heads as heads, which together have the hidden size; this model has "
            f"heads={config.heads}, kv_heads={config.n_kv_heads}, head_dim={config.d}, hidden={config.hidden}"
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie,
        "n_embd": config.hidden,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.inner,
        "n_positions": config.max_positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _llama_class_of(config: LlamaConfig) -> dict[str, Any]:
    """Return the entries that name transformers' class for a Llama of ours, and those that only this class has.

    Mistral is exactly Llama with a window and no biases. Mixtral is Mistral with experts.
    """
    if isinstance(config, MoELlamaConfig):
        if config.router != "softmax" or config.shared is not None:
            raise CheckpointError(
                f"Mixtral of transformers has a softmax router and no shared expert, and this model has router={config.router!r}, "
                f"shared={config.shared}: it has no config.json of transformers"
            )
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "sliding_window": config.window,
            "num_local_experts": config.experts,
            "num_experts_per_tok": config.top_k,
            "router_aux_loss_coef": config.balance,
            "router_jitter_noise": 0.0,
        }
    if config.window is None:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
        }
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": config.window}


def ours_of(theirs: Mapping[str, Any]) -> DecoderConfig:
    """Return our configuration that is equivalent to a ``config.json``.

    Raises:
        CheckpointError: if there is none.
    """
    kind = theirs.get("model_type")
    if kind == "gpt2":
        _same(
            theirs,
            activation_function="gelu_new",
            layer_norm_epsilon=1e-5,
            scale_attn_weights=True,
            scale_attn_by_inverse_layer_idx=False,
            add_cross_attention=False,
        )
        return GPTConfig(
            vocab_size=theirs["vocab_size"],
            hidden=theirs["n_embd"],
            layers=theirs["n_layer"],
            heads=theirs["n_head"],
            ffn=theirs.get("n_inner") or 4 * theirs["n_embd"],
            max_positions=theirs.get("n_positions", 1024),
            tie=theirs.get("tie_word_embeddings", True),
            dropout=theirs.get("resid_pdrop", 0.1),
        )
    if kind in ("llama", "mistral", "mixtral"):
        _same(theirs, hidden_act="silu", attention_bias=False, mlp_bias=False)
        rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
        scaled = rope.get("rope_type", rope.get("type", "default"))
        if scaled != "default":
            raise CheckpointError(
                f"rotary positions scaled by {scaled!r} are not in our Llama: keep Hugging Face's names"
            )
        # Defaults are transformers' own: for Mistral, the values of its 7B model.
        mistral = kind != "llama"
        common: dict[str, Any] = dict(
            vocab_size=theirs["vocab_size"],
            hidden=theirs["hidden_size"],
            layers=theirs["num_hidden_layers"],
            heads=theirs["num_attention_heads"],
            kv_heads=theirs.get("num_key_value_heads", 8 if mistral else None),
            head_dim=theirs.get("head_dim"),
            ffn=theirs["intermediate_size"],
            max_positions=theirs.get("max_position_embeddings", 4096 * 32 if mistral else 2048),
            window=theirs.get("sliding_window", 4096 if kind == "mistral" else None) if mistral else None,
            tie=theirs.get("tie_word_embeddings", False),
            rope_theta=rope.get("rope_theta", theirs.get("rope_theta", 1e6 if kind == "mixtral" else 10000.0)),
            norm_eps=theirs.get("rms_norm_eps", 1e-5 if kind == "mixtral" else 1e-6),
        )
        if kind == "mixtral":
            _same(theirs, router_jitter_noise=0.0)
            return MoELlamaConfig(
                **common,
                experts=theirs.get("num_local_experts", 8),
                top_k=theirs.get("num_experts_per_tok", 2),
                balance=theirs.get("router_aux_loss_coef", 0.001),
            )
        return LlamaConfig(**common)
    raise CheckpointError(
        f"there is no model of ours like {kind!r}, only gpt2, llama, mistral and mixtral: keep Hugging Face's names"
    )


def _same(theirs: Mapping[str, Any], **wanted: Any) -> None:
    for name, value in wanted.items():
        if theirs.get(name, value) != value:
            raise CheckpointError(
                f"config.json says {name}={theirs[name]!r}, and our model computes with {value!r}: keep Hugging Face's names"
            )
