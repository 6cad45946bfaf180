"""Losses that a model computes itself of a batch with rows of padding: which of them are those of the batch without padding."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshfold.mesh.model_io import CrossEntropyCall


class MeansOfTargets(TorchFunctionMode):
    """Function mode that remembers the cross entropies that are means over targets, where padding has ignored targets alone."""

    def __init__(self, given: int, rows: int, ignored: int) -> None:
        """Args:
        given, rows: of the batch, without and with padding.
        ignored: the label of padding.
        """
        super().__init__()
        self._given, self._rows, self._ignored = given, rows, ignored
        self._means: list[Tensor] = []

    def has(self, value: Tensor) -> bool:
        """Return True for one of these means, as it was computed."""
        return any(value is mean for mean in self._means)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.cross_entropy and self._ignores_padding(CrossEntropyCall(*args, **(kwargs or {}))):
            self._means.append(out)
        return out

    def _ignores_padding(self, call: CrossEntropyCall) -> bool:
        """Return True for a mean over targets to which padding adds none."""
        target = call.target
        if not call.is_mean_over_classes or call.ignore_index != self._ignored or target.numel() % self._rows:
            return False
        padding = target.reshape(self._rows, -1)[self._given :]
        return target.is_meta or bool((padding == self._ignored).all())
