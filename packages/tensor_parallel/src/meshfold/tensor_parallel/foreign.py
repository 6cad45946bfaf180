"""What models of the Hugging Face kind need beside their layers: their loss, their attention's dropout, calls of
``torch.nn.functional.dropout`` in their own code. By what a model has, not by which model it is."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh
from meshfold.tensor_parallel.layers.attention import attention
from meshfold.tensor_parallel.layers.dropout import Dropout, FunctionalDropout
from meshfold.tensor_parallel.layers.loss import CausalLMLoss
from meshfold.tensor_parallel.modes import Mode
from meshfold.tensor_parallel.rules import norm_eps

_ATTENTION = "meshfold"


def adapt_foreign(model: nn.Module, mesh: Mesh, mode: Mode, outer: Mode, hidden: int, vocabulary: int) -> list[str]:
    """Give a model the sharded loss and dropout where it has hooks for them; returns what was done, for the report."""
    notes = []
    if _is_causal_lm(model):
        loss = CausalLMLoss(mesh, outer, vocabulary)

        def loss_function(logits: Tensor, labels: Tensor, vocab_size: int | None = None, **kwargs: Any) -> Tensor:
            known = {k: v for k, v in kwargs.items() if k in ("num_items_in_batch", "shift_labels")}
            return loss(logits, labels, **known)  # type: ignore[no-any-return]

        model.loss_function = loss_function  # type: ignore[assignment]
        notes.append("loss: vocab-parallel cross entropy")
    if _drops_by_function(model):
        _wrap_dropout(model, mesh, mode, hidden)
        notes.append("functional dropout drops by global element")
        if _use_own_attention(model, mesh, mode):
            notes.append("attention: scaled dot product with dropout by global element")
    return notes


def check_rms_norm(name: str, module: nn.Module) -> None:
    """Raise a LayoutError unless a module called ...RMSNorm computes ``x / rms(x) · weight``."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    generator = torch.Generator("cpu").manual_seed(0)
    probe = torch.randn(weight.shape[0], generator=generator, dtype=torch.float64, device="cpu") + 1.5
    x = torch.randn(3, weight.shape[0], generator=generator, dtype=torch.float64, device="cpu")
    replaced = {
        key: torch.zeros(value.shape, dtype=torch.float64, device="cpu") if key != "weight" else probe
        for key, value in module.named_parameters()
    }
    found = torch.func.functional_call(module, replaced, (x,))
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps(module)) * probe
    if not torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-4):
        raise LayoutError(
            f"{name}: {type(module).__name__} is not the usual x / rms(x) * weight, which is what the rule for norms makes of "
            f"it: give the rule {name!r}: 'replicate'"
        )


def _is_causal_lm(model: nn.Module) -> bool:
    return hasattr(type(model), "loss_function") and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _drops_by_function(model: nn.Module) -> bool:
    names = ("dropout", "attention_dropout", "activation_dropout", "attn_pdrop")
    places = [*model.modules(), *(m.config for m in model.modules() if hasattr(m, "config"))]
    return any(isinstance(p := getattr(place, name, None), float) and p > 0 for place in places for name in names)


def _wrap_dropout(model: nn.Module, mesh: Mesh, mode: Mode, hidden: int) -> None:
    dropout = Dropout(0.0, mesh, mode, hidden, "functional")
    forward = model.forward

    @functools.wraps(forward)
    def with_dropout(*args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return forward(*args, **kwargs)
        with FunctionalDropout(dropout):
            return forward(*args, **kwargs)

    model.forward = with_dropout  # type: ignore[method-assign]


def _use_own_attention(model: nn.Module, mesh: Mesh, mode: Mode) -> bool:
    """Register our attention with transformers, which calls it by name, and choose it for this model."""
    config = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return False
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention_for_transformers)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, sdpa_mask)
    for name, module in model.named_modules():
        module._meshfold_place = (name, mesh, mode)  # type: ignore[assignment]
        if hasattr(module, "config") and hasattr(module.config, "_attn_implementation"):
            module.config._attn_implementation_internal = _ATTENTION
    return True


def _attention_for_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    name, mesh, mode = module._meshfold_place  # type: ignore[misc]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[2] > 1
    out = attention(
        query, key, value, mesh=mesh, mode=mode, mask=attention_mask, causal=causal, scale=scaling, dropout=dropout, name=name
    )
    return out.transpose(1, 2).contiguous(), None
