"""Rows of tokens as experts get them: sorted by expert, possibly followed by unused rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from meshfold.kernels import take_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """The rows that experts work on.

    Attributes:
        tokens: [n, h], of which rows are copies.
        pairs, places: the token of each row and the rows of each token, as for :func:`meshfold.kernels.take_rows`.
        ends: [e] int32, on the device: the row after the last of each expert.
        counts: the numbers of rows, where the host knows them; else None.
        weights: [m]: of the outputs, for experts that weigh them; else None. Undefined where ``values`` are.
        keeps: keep rows for backward instead of copying them from the tokens again.
    """

    tokens: Tensor
    pairs: Tensor
    places: Tensor
    ends: Tensor
    counts: Sequence[int] | None = None
    weights: Tensor | None = None
    keeps: bool = True

    @property
    def values(self) -> Tensor:
        """[m, h], sorted by expert, copied anew on each access.

        Rows after ``ends[-1]`` are undefined and may be NaN: their outputs are not read, and they give no gradient.
        """
        return take_rows(self.tokens, self.pairs, self.places)

    @property
    def filled(self) -> Tensor:
        """[1] int32, on the device: the number of rows in use."""
        return self.ends[-1:]


Run: TypeAlias = Callable[[ExpertRows], Tensor]
"""From rows to outputs [m, h]; weighted ones if it is given weights."""
