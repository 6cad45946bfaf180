"""Attention of a model, routed to a function: of our own models, and of transformers' by the registry of its attention functions.

No model has a file here. Inside :func:`routed`, each attention layer passes its queries, keys and values to a function. Each
token is a row, and the model makes no masks of its own. Outside of it the model is unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from meshfold.kernels import apply_rotary
from meshfold.mesh import SpecError
from meshfold.models.generate import attention_layers, attention_window

NAME = "meshfold_paged"
_PAGED = "_meshfold_paged"
_KNOWN = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", None)
_UNKNOWN = ("softcap", "position_bias", "s_aux", "head_mask")


Tables = tuple[Tensor, Tensor] | None
"""Cosines and sines that turn queries and keys by their positions; None: they are turned, or do not turn."""


Paged = Callable[..., Tensor]
"""Attention of one layer as one operation of compiled code: q, k, v, ``scale`` and ``window``, as of :class:`Attend`."""


class Attend(Protocol):
    """Function of one layer: q ``t heads d``, k and v ``t kv_heads d`` -> ``t heads d``."""

    def __call__(
        self,
        layer: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        window: int | None,
        rotary: Tables = None,
    ) -> Tensor:
        """Attend; ``rotary``: tables ``t d``."""


class _Own:
    """Attention of a layer of ours. Objects of one class are the same to torch.compile, so all blocks share compiled code."""

    def __init__(self, layer: nn.Module, attend: Attend, window: int | None, paged: Paged | None) -> None:
        self.layer, self.attend, self.window, self.paged = layer, attend, window, paged

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Tables) -> Tensor:
        """Attend: q ``t 1 heads d``, k and v ``t 1 kv_heads d``; ``rotary``: tables ``1 d`` or ``t 1 d``."""
        if torch.compiler.is_compiling() and self.paged is not None:
            if rotary is not None:
                q, k = apply_rotary(q, k, *rotary)
            new = (x.squeeze(1) for x in (q, k, v))
            return self.paged(*new, scale=None, window=self.window).unsqueeze(1)
        found: Tensor = _attend_own(self, q, k, v, rotary)
        return found


def _run_own(own: _Own, q: Tensor, k: Tensor, v: Tensor, rotary: Tables) -> Tensor:
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    tables = None
    if rotary is not None:
        tables = rotary[0].expand(*q.shape[:2], -1).flatten(0, 1), rotary[1].expand(*q.shape[:2], -1).flatten(0, 1)
    return own.attend(own.layer, *flat, scale=None, window=own.window, rotary=tables).view(q.shape)


_attend_own = torch.compiler.disable(_run_own)
_routes: WeakKeyDictionary[nn.Module, Attend] = WeakKeyDictionary()


def unrouted_reason(model: nn.Module) -> str:
    """Return why the attention of a model cannot be routed; empty if it can, as far as can be seen without calling it."""
    model = getattr(model, "_orig_mod", model)
    if getattr(model, "caches_keys", False):
        return "" if attention_layers(model) else "its sequences are split over ranks, or its attention is not its own"
    if not _is_hugging_face(model):
        return "it is neither one of meshfold.models nor transformers'"
    kind = getattr(model.config, "_attn_implementation", None)
    if kind not in _KNOWN:
        return f"its attention is {kind!r}"
    return ""


@contextmanager
def routed(model: nn.Module, attend: Attend, paged: Mapping[nn.Module, Paged] | None = None) -> Iterator[None]:
    """Context manager: every attention layer of a model calls ``attend``; in compiled code its own of ``paged``, where given."""
    paged = paged or {}
    model = getattr(model, "_orig_mod", model)
    own = attention_layers(model)
    if own:
        window = attention_window(model)
        for layer in own:
            layer.attend = _Own(layer, attend, window, paged.get(layer))
        try:
            yield
        finally:
            for layer in own:
                layer.attend = None
        return
    with _registered(model, attend, paged):
        yield


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the layer that makes logits, if it is known."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_output_embeddings"):
        found = cast(Any, model).get_output_embeddings()
    else:
        found = getattr(model, "head", None)
    return found if isinstance(found, nn.Module) else None


def _is_hugging_face(model: nn.Module) -> bool:
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


@contextmanager
def _registered(model: nn.Module, attend: Attend, paged: Mapping[nn.Module, Paged]) -> Iterator[None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)  # and no function for masks of this name: none are made
    modules = list(model.modules())
    configs = {id(m.config): m.config for m in modules if hasattr(m, "config")}
    before = [(c, c._attn_implementation) for c in configs.values() if hasattr(c, "_attn_implementation")]
    for module in modules:
        _routes[module] = attend
    for module, layer in paged.items():
        module.__dict__[_PAGED] = layer
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name
        for module in modules:
            _routes.pop(module, None)
            module.__dict__.pop(_PAGED, None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend, as the registry of transformers calls it: ``t heads 1 d`` -> ``t 1 heads d``."""
    who = type(module).__name__
    unknown = [name for name in _UNKNOWN if others.get(name) is not None]
    if unknown or attention_mask is not None:
        raise SpecError(
            f"{who} gives its attention {', '.join(unknown) or 'a mask'}, which paged attention does not have"
        )
    if query.shape[2] != 1 or is_causal is False or not getattr(module, "is_causal", True):
        raise SpecError(
            f"{who} attends to later tokens, or to others than its own: pages are for causal self-attention"
        )
    q, k, v = (x.squeeze(2) for x in (query, key, value))
    if torch.compiler.is_compiling():
        paged: Paged | None = getattr(module, _PAGED, None)
        if paged is not None:
            return paged(q, k, v, scale=scaling, window=sliding_window).unsqueeze(1), None
    return _uncompiled(module, q, k, v, scaling, sliding_window), None


def _run(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, sliding_window: int | None
) -> Tensor:
    return _routes[module](module, q, k, v, scale=scaling, window=sliding_window).unsqueeze(1)


_uncompiled = torch.compiler.disable(_run)
