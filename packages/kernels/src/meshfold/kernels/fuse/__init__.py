"""Fused kernels that replace a model's own operations, in any ``nn.Module``, found by shape and by trial.

    RMSNorm, LayerNorm      a module that computes what :func:`meshfold.kernels.rms_norm` or ``layer_norm`` does, of any name
    residual + norm         x = x + branch(...); norm(x) inside of one module, whose children branch and norm are
    gated activations       silu(gate) * up or gelu(gate) * up, where the activation of a module is only ever multiplied
    composed activation     GELU or SiLU that a module writes in several operations
    rotary embedding        a function (q, k, cos, sin) of the Hugging Face kind that a module's forward calls
    linear + cross entropy  a head whose logits only the loss reads: they are never held whole

Each rule tests a module on small random tensors before it changes it. Each replacement falls back to the model's own code where it
is not better: under torch.compile, in another dtype than its weights', on a device without Triton. Names, parameters and state
dicts do not change. Nothing is patched outside of the model's own modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from meshfold.kernels.fuse.activations import fuse_gated
from meshfold.kernels.fuse.composed import fuse_composed
from meshfold.kernels.fuse.heads import DeferredLogits, defer_logits, leaves_out_logits
from meshfold.kernels.fuse.logits import LazyLogits
from meshfold.kernels.fuse.norms import Norm, find_norms, fuse_norms, offered_norms
from meshfold.kernels.fuse.replaced import Replaced, is_compiled
from meshfold.kernels.fuse.residual import fuse_residuals
from meshfold.kernels.fuse.rotary import fuse_rotary
from meshfold.kernels.fuse.split_rows import SplitRows

__all__ = [
    "RULES",
    "DeferredLogits",
    "FusedModel",
    "LazyLogits",
    "Norm",
    "SplitRows",
    "fuse",
    "is_compiled",
    "leaves_out_logits",
]

RULES: Mapping[str, str] = {
    "norm": "RMSNorm or LayerNorm in one launch",
    "gated": "activation(gate) * up in one launch",
    "activation": "activation of several operations in one launch",
    "rotary": "rotary embedding of queries and keys in one launch",
    "residual": "residual + norm in one launch",
    "loss": "linear + cross entropy, without whole logits",
}
"""The rules by name, and the kernels that each puts into a model."""


@dataclass(kw_only=True)
class FusedModel:
    """The replacements in one model.

    Attributes:
        modules: for each rule that found anything, the names of the modules.
        logits: the heads whose logits may be left out; None without the rule ``loss``.
    """

    modules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    logits: DeferredLogits | None = None
    _replaced: list[Replaced] = field(default_factory=list)

    def __str__(self) -> str:
        """Return a line for each rule: the fused operations, the number of modules, and the first of them."""
        if not self.modules:
            return "fused: nothing"
        return "\n".join(
            f"fused: {RULES[rule]}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
            for rule, names in self.modules.items()
        )

    def close(self) -> None:
        """Give every module its own forward back."""
        while self._replaced:
            self._replaced.pop().close()
        self.logits = None


def fuse(
    model: nn.Module,
    *,
    norm: bool | None = None,
    gated: bool | None = None,
    activation: bool | None = None,
    rotary: bool | None = None,
    residual: bool | None = None,
    loss: bool | None = None,
) -> FusedModel:
    """Put fused kernels into a model, in place, and return the replacements.

    Args:
        model: real or meta weights; in training or not.
        norm, gated, activation, rotary, residual, loss: the rules. None: where it pays, which is decided at each call (on a GPU;
            logits from :data:`meshfold.kernels.fuse.heads.WORTHWHILE` elements on, on any device). True: always. False: never.

    What torch.compile has been given, a module or the whole model, keeps its own operations.
    """
    found = FusedModel()
    norms = {} if residual is False else {module: kind for _, module, kind in find_norms(model)} | offered_norms(model)
    for rule, always, apply in (
        ("norm", norm, fuse_norms),
        ("gated", gated, fuse_gated),
        ("activation", activation, fuse_composed),
        ("rotary", rotary, fuse_rotary),
    ):
        if always is False:
            continue
        replaced = apply(model, always=always is True)
        if replaced:
            found.modules[rule] = tuple(each.name for each in replaced)
            found._replaced += replaced
    if norms:  # last, to wrap what the other fusions have put into blocks
        blocks, names = fuse_residuals(model, norms, always=residual is True)
        if names:
            found.modules["residual"] = names
            found._replaced += blocks
    if loss is not False:
        deferred = defer_logits(model, always=loss is True)
        if deferred.heads:
            found.modules["loss"] = tuple(each.name for each in deferred.heads)
            found._replaced += deferred.heads
            found.logits = deferred
    return found
