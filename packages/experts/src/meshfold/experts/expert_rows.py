"""Rows of tokens as experts get them: sorted by expert, possibly followed by unused rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSource:
    """The tokens that rows are copied from: backward copies them again, so that they need not be kept.

    Attributes:
        tokens: [n, h].
        pairs, places: as for :func:`meshfold.kernels.take_rows`.
    """

    tokens: Tensor
    pairs: Tensor
    places: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """The rows that experts work on.

    Attributes:
        values: [m, h], sorted by expert. Rows after ``ends[-1]`` are undefined and may be NaN: their outputs are not read, and they
            give no gradient.
        ends: [e] int32, on the device: the row after the last of each expert.
        counts: the numbers of rows, where the host knows them; else None.
        weights: [m]: of the outputs, for experts that weigh them; else None. Undefined where ``values`` are.
        source: of ``values``, if backward should copy them again instead of keeping them.
        parameters: to use instead of the experts' own, by name: the same values, with gradients of their own. None: the own.
    """

    values: Tensor
    ends: Tensor
    counts: Sequence[int] | None = None
    weights: Tensor | None = None
    source: RowSource | None = field(default=None, repr=False)
    parameters: Mapping[str, Tensor] | None = field(default=None, repr=False)

    @property
    def filled(self) -> Tensor:
        """[1] int32, on the device: the number of rows in use."""
        return self.ends[-1:]


Run: TypeAlias = Callable[[ExpertRows], Tensor]
"""From rows to outputs [m, h]; weighted ones if it is given weights."""
