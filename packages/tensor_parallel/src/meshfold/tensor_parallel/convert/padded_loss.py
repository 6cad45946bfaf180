"""Losses that a model computes itself of a batch with rows of padding: which of them are those of the batch without padding."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshfold.mesh.model_io import IGNORE_INDEX


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
        if func is F.cross_entropy and self._leaves_padding_out(*args, **(kwargs or {})):
            self._means.append(out)
        return out

    def _leaves_padding_out(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> bool:
        """Return True if padding has no part in this call of :func:`torch.nn.functional.cross_entropy`."""
        if reduction != "mean" or ignore_index != self._ignored or (size_average, reduce) != (None, None):
            return False
        if target.is_floating_point() or target.numel() % self._rows:
            return False
        padding = target.reshape(self._rows, -1)[self._given :]
        return target.is_meta or bool((padding == self._ignored).all())
