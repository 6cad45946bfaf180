"""Small random models of each Hugging Face family, what each is called with, and exact arithmetic for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

VOCABULARY, LENGTH = 101, 8
IDS: dict[str, Any] = dict(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0)
BODY: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
LLAMA: dict[str, Any] = dict(**IDS, **BODY, num_key_value_heads=2, max_position_embeddings=32)
BERT: dict[str, Any] = dict(
    **IDS, **BODY, max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": (
        "OPTForCausalLM",
        dict(
            **IDS,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            word_embed_proj_dim=32,
            dropout=0.0,
        ),
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        dict(**IDS, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    ),
    "llama": ("LlamaForCausalLM", LLAMA),
    "qwen2": ("Qwen2ForCausalLM", dict(**LLAMA, tie_word_embeddings=True)),
    "qwen3": ("Qwen3ForCausalLM", dict(**LLAMA, head_dim=16)),
    "mistral": ("MistralForCausalLM", dict(**LLAMA, sliding_window=4)),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "olmo3": ("Olmo3ForCausalLM", dict(**LLAMA, sliding_window=4)),
    "falcon": (
        "FalconForCausalLM",
        dict(
            **IDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_kv_heads=4,
            new_decoder_architecture=True,
            bias=True,
        ),
    ),
    "falcon-one-key": (
        "FalconForCausalLM",
        dict(**IDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, multi_query=True),
    ),
    "falcon-alibi": (
        "FalconForCausalLM",
        dict(**IDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, multi_query=False, alibi=True),
    ),
    "bloom": (
        "BloomForCausalLM",
        dict(**IDS, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    ),
    "mpt": ("MptForCausalLM", dict(vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=32)),
    "stablelm": ("StableLmForCausalLM", dict(**LLAMA, qk_layernorm=True)),
    "gemma3": (
        "Gemma3ForCausalLM",
        dict(
            **LLAMA,
            head_dim=16,
            sliding_window=4,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "granite": (
        "GraniteForCausalLM",
        dict(**LLAMA, embedding_multiplier=2.0, logits_scaling=4.0, residual_multiplier=0.5, attention_multiplier=0.3),
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        dict(**LLAMA, sliding_window=4, logit_scale=0.5, layer_types=["sliding_attention", "full_attention"]),
    ),
    "phi": ("PhiForCausalLM", dict(**IDS, **BODY, max_position_embeddings=32, qk_layernorm=True)),
    "gptj": (
        "GPTJForCausalLM",
        dict(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            rotary_dim=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
    ),
    "glm4": ("Glm4ForCausalLM", dict(**LLAMA, head_dim=8)),
    "nemotron": ("NemotronForCausalLM", LLAMA),
    "smollm3": ("SmolLM3ForCausalLM", dict(**LLAMA, no_rope_layers=[1, 0])),
    "mixtral": ("MixtralForCausalLM", dict(**LLAMA, num_local_experts=4, num_experts_per_tok=2)),
    "bert": ("BertForMaskedLM", BERT),
    "bert-classes": ("BertForSequenceClassification", dict(**BERT, num_labels=3)),
    "distilbert": (
        "DistilBertForMaskedLM",
        dict(
            vocab_size=VOCABULARY,
            pad_token_id=0,
            dim=32,
            hidden_dim=64,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=32,
            dropout=0.0,
            attention_dropout=0.0,
        ),
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        dict(**IDS, **BODY, cls_token_id=1, sep_token_id=2, max_position_embeddings=32, local_attention=4),
    ),
    "vit": (
        "ViTForImageClassification",
        dict(
            **BODY,
            image_size=16,
            patch_size=4,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
    ),
    "mbart": (
        "MBartForConditionalGeneration",
        dict(
            **IDS,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=32,
            dropout=0.0,
        ),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        dict(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
    ),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        dict(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_heads=4,
            num_experts=4,
            expert_capacity=4,
            dropout_rate=0.0,
            router_aux_loss_coef=0.0,
            router_z_loss_coef=0.0,
            router_jitter_noise=0.0,
            decoder_start_token_id=0,
        ),
    ),
}
"""Class and sizes, by what the tests call them."""
SEQ2SEQ = ("mbart", "t5", "switch")
CAUSAL = (
    "opt",
    "gpt2",
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "olmo2",
    "olmo3",
    "falcon",
    "falcon-one-key",
    "falcon-alibi",
    "bloom",
    "mpt",
    "stablelm",
    "gemma3",
    "granite",
    "cohere2",
    "phi",
    "gptj",
    "glm4",
    "nemotron",
    "smollm3",
    "mixtral",
)


def model_of(kind: str, **changes: Any) -> Any:
    """A model with random weights, none of them zero or one, where a mistake would not show."""
    import transformers

    name, sizes = FAMILIES[kind]
    made = getattr(transformers, name)
    torch.manual_seed(0)
    model = made(made.config_class(**{**sizes, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def folder_of(kind: str, root: Path, **changes: Any) -> Path:
    """A folder that transformers wrote."""
    folder = root / kind
    model_of(kind, **changes).save_pretrained(folder)
    return folder


def batch_of(kind: str, rows: int = 4, seed: int = 1) -> dict[str, Tensor]:
    """What a family is trained on; some labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "vit":
        pixels = torch.randn(rows, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.arange(rows) % 3}
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)
    if kind == "bert-classes":
        return {"input_ids": ids, "labels": torch.arange(rows) % 3}
    labels = ids.clone() if kind in CAUSAL else ids.flip(1).contiguous()
    labels[0, 3] = labels[-1, 1:6] = -100
    return {"input_ids": ids, "labels": labels}


class InFloat64(TorchFunctionMode):
    """Keeps float64 where a model's own code goes over float32 (norms, losses, routers): differences are then mistakes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to and torch.float32 in args:
                return args[0]
            if func in (F.softmax, Tensor.softmax, torch.softmax) and kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
            if func is Tensor.matmul and args[1].dtype == torch.float32:
                args = (args[0].float(), args[1])  # rotary frequencies times positions: float32 everywhere
        return func(*args, **kwargs)
