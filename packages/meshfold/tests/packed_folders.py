"""Folders of a small Llama as AWQ, GPTQ, compressed-tensors and fp8 write them, by their published layouts, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of a word of AWQ, from its lowest bits on (awq/quantize/qmodule.py)."""
Parts = tuple[dict[str, Tensor], Tensor]
"""tensors of a layer, and the weight that they stand for in float32"""


def word(codes: list[int], bits: int) -> int:
    """An int32 of codes, the first in the lowest bits."""
    found = sum(code << (bits * i) for i, code in enumerate(codes))
    return found - (1 << 32) if found >= 1 << 31 else found


def words(codes: Tensor, bits: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """``a b`` -> ``a b bits / 32`` int32, along the rows."""
    per = 32 // bits
    return torch.tensor(
        [
            [word([row[at + i] for i in order[:per]], bits) for at in range(0, len(row), per)]
            for row in codes.int().tolist()
        ],
        dtype=torch.int32,
    )


def drawn(n: int, groups: int, bits: int, k: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes ``n k``, zero points and scales ``n g``; scales have the digits of half precision."""
    codes = torch.randint(0, 1 << bits, (n, k), generator=random)
    zero = torch.randint(1, 1 << bits, (n, groups), generator=random)
    scale = (torch.rand(n, groups, generator=random) * 0.04 + 0.01) * (16 if bits == 4 else 1) / 16
    return codes, zero, scale.half()


def awq(n: int, k: int, random: torch.Generator) -> Parts:
    codes, zero, scale = drawn(n, k // GROUP, 4, k, random)
    weight = (codes - zero.repeat_interleave(GROUP, 1)).float() * scale.float().repeat_interleave(GROUP, 1)
    return {
        "qweight": words(codes.t(), 4, AWQ_ORDER),
        "qzeros": words(zero.t(), 4, AWQ_ORDER),
        "scales": scale.t().contiguous(),
    }, weight


def gptq(n: int, k: int, random: torch.Generator, *, bits: int = 4, ordered: bool = True, offset: int = 1) -> Parts:
    codes, zero, scale = drawn(n, k // GROUP, bits, k, random)
    index = torch.arange(k) // GROUP
    if not ordered:
        index = index[torch.randperm(k, generator=random)]
    weight = (codes - zero[:, index]).float() * scale.float()[:, index]
    return {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(zero.t() - offset, bits),
        "scales": scale.t().contiguous(),
        "g_idx": index.int(),
    }, weight


def packed(n: int, k: int, random: torch.Generator, *, bits: int = 4, symmetric: bool = True) -> Parts:
    codes, zero, scale = drawn(n, k // GROUP, bits, k, random)
    if symmetric:
        zero = torch.full_like(zero, 1 << (bits - 1))
    weight = (codes - zero.repeat_interleave(GROUP, 1)).float() * scale.float().repeat_interleave(GROUP, 1)
    found = {"weight_packed": words(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
    if not symmetric:
        found["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    return found, weight


def rows(n: int, k: int, random: torch.Generator, *, dtype: torch.dtype) -> Parts:
    codes, _, scale = drawn(n, 1, 8, k, random)
    made = (codes - 128).to(torch.int8) if dtype == torch.int8 else ((codes - 128) / 4).to(dtype)
    scale = scale.bfloat16() / (1 if dtype == torch.int8 else 0.25)
    return {"weight": made, "weight_scale": scale}, made.float() * scale.float()


def blocks(n: int, k: int, random: torch.Generator, *, inverse: bool = True) -> Parts:
    codes = (torch.randn(n, k, generator=random) * 8).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-n // GROUP), k // GROUP, generator=random) * 0.05
    wide = scale.repeat_interleave(GROUP, 0)[:n].repeat_interleave(GROUP, 1)
    return {"weight": codes, "weight_scale_inv" if inverse else "weight_scale": scale}, codes.float() * wide


def whole(n: int, k: int, random: torch.Generator) -> Parts:
    codes = (torch.randn(n, k, generator=random) * 8).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": torch.tensor(0.03), "input_scale": torch.tensor(0.5)}, codes.float() * 0.03


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMS: dict[str, tuple[dict[str, Any], Callable[..., Parts], dict[str, Any]]] = {
    "awq": (dict(quant_method="awq", bits=4, group_size=GROUP, version="gemm", zero_point=True), awq, {}),
    "gptq": (dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=False), gptq, {}),
    "gptq act order": (dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=True), gptq, dict(ordered=False)),
    "gptq v2 8 bits": (
        dict(quant_method="gptq", bits=8, group_size=GROUP, checkpoint_format="gptq_v2"),
        gptq,
        dict(bits=8, offset=0),
    ),
    "compressed int4": (compressed("pack-quantized", num_bits=4, group_size=GROUP), packed, {}),
    "compressed int4 zero": (compressed("pack-quantized", num_bits=4, symmetric=False), packed, dict(symmetric=False)),
    "compressed int8 packed": (compressed("pack-quantized", num_bits=8), packed, dict(bits=8, symmetric=False)),
    "compressed int8": (compressed("int-quantized", num_bits=8, strategy="channel"), rows, dict(dtype=torch.int8)),
    "compressed fp8": (
        compressed("float-quantized", num_bits=8, type="float"),
        rows,
        dict(dtype=torch.float8_e4m3fn),
    ),
    "compressed fp8 blocks": (
        compressed("float-quantized", num_bits=8, block_structure=[GROUP, GROUP]),
        blocks,
        dict(inverse=False),
    ),
    "fp8 blocks": (dict(quant_method="fp8", weight_block_size=[GROUP, GROUP]), blocks, {}),
    "fp8 tensor": (dict(quant_method="fp8"), whole, {}),
}
"""Configuration, and what makes a layer, by name."""


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * (1.0 if "embed" in name or "head" in name else 0.3))
    return model


def write(folder: Path, form: str) -> Any:
    """Write a folder with packed layers, all but the head; return transformers' model with the weights that they stand for."""
    settings, make, options = FORMS[form]
    model, random = llama(), torch.Generator().manual_seed(len(form))
    files: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        if value.dim() == 2 and leaf == "weight" and "proj" in name:
            parts, weight = make(*value.shape, random, **options)
            files |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            value.copy_(weight)
        else:
            files[name] = value.clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    told = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(told))
    return model
