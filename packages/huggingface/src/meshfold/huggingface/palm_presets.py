"""PaLM (Chowdhery et al. 2022, arXiv 2204.02311) as transformers' Cohere: attention and MLP in parallel, one key/value head.

``CohereForCausalLM`` with one key/value head, logits that are not scaled and no norms of queries and keys computes what
PaLM-pytorch does. Rows of the query and key projections lie in another order there: its rotary embedding turns halves of a head,
Cohere's neighbours (:func:`rotary_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import SpecError, did_you_mean

_FFN = 4  # inner dim of an MLP in hidden dims
_COMMON = dict(vocab_size=50304, max_positions=2048)
PALM: Mapping[str, Mapping[str, int]] = {
    "palm-tiny": dict(vocab_size=256, hidden=64, layers=2, heads=4, max_positions=128),
    "palm-small": dict(hidden=768, layers=12, heads=12, **_COMMON),
    "palm-1b": dict(hidden=2048, layers=16, heads=16, **_COMMON),
    "palm-8b": dict(hidden=4096, layers=32, heads=16, **_COMMON),
    "palm-16b": dict(hidden=4096, layers=64, heads=16, **_COMMON),
    "palm-30b": dict(hidden=6144, layers=48, heads=24, **_COMMON),
    "palm-62b": dict(hidden=8192, layers=64, heads=32, **_COMMON),
}
"""Shapes of hpcaitech/PaLM-colossalai, one of 1.05 billion parameters, and a tiny one for bytes. The inner dim of an MLP is four
times the hidden dim."""


def palm_sizes(name: str, **changes: int) -> dict[str, int]:
    """Return the sizes of a PaLM by name, some of them changed.

    Raises:
        SpecError: for an unknown name or size.
    """
    if name not in PALM:
        raise SpecError(f"there is no PaLM {name!r}.{did_you_mean(name, PALM)} Known: {', '.join(PALM)}")
    sizes = dict(PALM[name])
    for field, value in changes.items():
        if field not in sizes:
            raise SpecError(
                f"model {name!r} has no setting {field!r}.{did_you_mean(field, sizes)} Known: {', '.join(sizes)}"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpecError(f"model {name!r}: {field}={value!r}; give a whole number above 0")
    sizes |= changes
    if sizes["hidden"] % sizes["heads"]:
        raise SpecError(f"model {name!r}: heads={sizes['heads']} do not divide hidden={sizes['hidden']}")
    return sizes


def palm_config(name: str, **changes: int) -> Any:
    """Return transformers' configuration of a PaLM: ``palm_config("palm-8b", layers=4)``.

    Raises:
        SpecError: for an unknown name or size.
    """
    from transformers import CohereConfig

    sizes = palm_sizes(name, **changes)
    return CohereConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden"],
        intermediate_size=_FFN * sizes["hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=1,
        max_position_embeddings=sizes["max_positions"],
        logit_scale=1.0,
        use_qk_norm=False,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def palm(name: str, **changes: int) -> nn.Module:
    """Return a PaLM with fresh weights; give an engine a function that calls this, ``lambda: palm("palm-8b")``.

    Raises:
        SpecError: for an unknown name or size.
    """
    from transformers import CohereForCausalLM

    model: nn.Module = CohereForCausalLM(palm_config(name, **changes))
    return model


def rotary_rows(weight: Tensor, head_dim: int, *, to_halves: bool = False) -> Tensor:
    """Return a query or key projection of PaLM-pytorch with its rows in Cohere's order: ``(heads head_dim) k`` to the same.

    Args:
        weight: of whole heads.
        head_dim: elements of a head.
        to_halves: the other way, from Cohere's order to PaLM-pytorch's.
    """
    halves = torch.arange(head_dim).view(2, -1)  # element i of a half turns with element i of the other
    order = halves.t().reshape(-1)
    order = order.argsort() if to_halves else order
    heads = weight.unflatten(0, (-1, head_dim))
    found: Tensor = heads[:, order.to(weight.device)].flatten(0, 1)
    return found
