"""A loss that torch's ``GradScaler`` has scaled, whose gradients the engine's step would take as they are.

The scaler multiplies the loss by a tensor that it keeps. A product with a number of the user's own looks the same, save that no
scaler has the number: only the scaler is looked for. Under ``saved_tensors_hooks`` the graph has what the user's hook has packed,
often a copy: then a scaler with the same number is looked for. The hook is not called, since it may give a tensor once.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_LOOKS = 3
"""Losses that are looked at closely: all objects are gone through for the scaler, which begins with the first loss or never."""
_DEEP = 4
"""Products behind a loss, such as ``scaler.scale(loss) / 2``."""


class OwnScaler:
    """Finder of a user's ``GradScaler`` behind the losses of an engine, that warns once of a step without ``unscale_``."""

    def __init__(self, advice: str) -> None:
        """Args:
        advice: what to do instead, appended to the warning.
        """
        self._advice = advice
        self._looks = _LOOKS
        self._found: ref[Any] | None = None

    def saw(self, loss: Tensor) -> None:
        """Look whether a scaler has multiplied the loss of a backward."""
        if self._looks and self._found is None and (scale := _factor(loss.grad_fn)) is not None:
            self._looks -= 1
            owner = _scaler_with(scale[0]) if scale[1] else _scaler_of(scale[0])
            self._found = None if owner is None else ref(owner)

    def check(self) -> None:
        """Warn if the gradients that a step takes were not unscaled by the scaler."""
        scaler = None if self._found is None else self._found()
        if scaler is None or _is_unscaled(scaler):
            return
        self._found, self._looks = None, 0
        warnings.warn(
            f"engine.step() takes the gradients of a loss that a GradScaler has multiplied by {scaler.get_scale():g}, and "
            "scaler.unscale_(engine.optimizer) was not called: clipping, weight decay and most optimizers are given gradients that "
            f"are too large by that factor, unless you have divided them. {self._advice}",
            stacklevel=5,
        )


def _factor(node: Any) -> tuple[Tensor, bool] | None:
    """Return the tensor without dims that a loss was multiplied by, and whether it may be a hook's copy; None without one."""
    for _ in range(_DEEP):
        kind = "" if node is None else node.name()
        if not kind.startswith(("MulBackward", "DivBackward")):
            return None
        if kind.startswith("Mul") and (raw := getattr(node, "_raw_saved_other", None)) is not None:
            hooked = getattr(raw, "unpack_hook", None) is not None
            for other in tree_leaves(raw.data) if hooked else (node._saved_other,):
                if _is_factor(other):
                    return other, hooked
        node = node.next_functions[0][0]
    return None


def _is_factor(other: object) -> bool:
    return isinstance(other, Tensor) and other.dim() == 0 and other.dtype == torch.float32 and not other.requires_grad


def _scaler_of(scale: Tensor) -> Any:
    """Return the scaler that keeps a tensor; None without one."""
    found = next((one for one in gc.get_referrers(scale) if _has(one, scale)), None)
    return _owner(found) if isinstance(found, dict) else found


def _scaler_with(scale: Tensor) -> Any:
    """Return a scaler that scales by a number; None without one."""
    # isinstance would ask an object's own __class__: that of a weak proxy raises an error once its object is gone.
    scalers = [one for one in gc.get_objects() if issubclass(type(one), torch.amp.GradScaler)]
    return next((one for one in scalers if one._scale is not None and one.get_scale() == float(scale)), None)


def _has(owner: Any, scale: Tensor) -> bool:
    own = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    return isinstance(own, dict) and own.get("_scale") is scale and "_per_optimizer_states" in own


def _owner(own: dict[str, Any]) -> Any:
    return next((one for one in gc.get_referrers(own) if getattr(one, "__dict__", None) is own), None)


def _is_unscaled(scaler: Any) -> bool:
    states: Any = scaler._per_optimizer_states
    return any(getattr(state.get("stage"), "name", "") == "UNSCALED" for state in states.values())
