"""MFU: the share of the devices' peak that the model's own arithmetic makes up (Chowdhery et al., "PaLM: Scaling Language
Modeling with Pathways", arXiv 2204.02311, appendix B).

A token costs ``6 N + 12 L h s`` operations, forward and backward: N parameters that multiply (all but tables that are only
looked up), L layers of attention of width h (all heads together) over s tokens, of which a causal mask is not taken off; a
``window`` that is shorter stands in place of s. What recomputation does is not counted: it is no work of the model's.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from meshfold.planner import PEAK_TFLOPS


def flops_per_token(build: Callable[[], nn.Module], seq_len: int) -> float:
    """Operations for one token of a sequence, forward and backward.

    Args:
        build: makes the model; it is run without allocating.
        seq_len: tokens of a sequence.
    """
    with torch.device("meta"):
        model = build()
    parameters = {id(p): p.numel() for p in model.parameters()}
    multiplies = {
        id(m.weight) for m in model.modules() if not isinstance(m, nn.Embedding) and hasattr(m, "weight")
    }
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in multiplies:
            parameters.pop(id(module.weight), None)
    config = getattr(model, "config", None)
    layers = _first(config, "layers", "num_hidden_layers", "n_layer")
    width = _first(config, "heads", "num_attention_heads", "n_head") * _first(config, "head_dim")
    width = width or _first(config, "hidden", "hidden_size", "n_embd")
    seen = min(seq_len, getattr(config, "window", None) or seq_len)
    return 6.0 * sum(parameters.values()) + 12.0 * layers * width * seen


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The data sheet's operations a second of this rank's device; None for one that is not in the table."""
    return peak_of_gpu(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def peak_of_gpu(name: str, precision: str) -> float | None:
    """The same by the name that a GPU gives itself."""
    found = next((peaks for key, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)), None)
    return None if found is None else found[precision] * 1e12


def _first(config: object, *names: str) -> int:
    """The first of these that a configuration has; 0 without."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
