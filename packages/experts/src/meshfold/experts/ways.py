"""Ways for tokens to reach the ranks of their experts and for sums to come back: only the messages.

A way has two directions, which are adjoint: ``there`` sends rows of tokens to the experts' ranks, and ``back`` returns one row for
each of them. ``returned`` then sums these on the tokens' rank. Backward goes the same ways: gradients of tokens come back,
gradients of sums go there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from meshfold.mesh import Group, Pending, all_gather, all_to_all, exchange_rows


class Way(Protocol):
    """A way of rows to the ranks of their experts and back.

    Attributes:
        arriving: the number of rows that come to this rank.
    """

    @property
    def arriving(self) -> int: ...

    def there(self, x: Tensor) -> Pending:
        """Start to send rows to the ranks of experts: ``[m, ..] -> [arriving, ..]``."""

    def back(self, x: Tensor) -> Pending:
        """Start to send rows back where they came from: ``[arriving, ..] -> [m', ..]``."""

    def returned(self, x: Tensor) -> Tensor:
        """Put together what :meth:`back` brought, as the adjoint of :meth:`there` would: ``[m', ..] -> [m, ..]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToSome:
    """Each rank is sent the rows that it works on, and no others: an all-to-all whose sizes the host has to know.

    Attributes:
        sends, receives: rows for each rank and from each.
    """

    group: Group
    sends: Sequence[int]
    receives: Sequence[int]

    @property
    def arriving(self) -> int:
        """Rows that arrive at this rank."""
        return sum(self.receives)

    def there(self, x: Tensor) -> Pending:
        return exchange_rows(x, self.group, self.sends, self.receives)

    def back(self, x: Tensor) -> Pending:
        return exchange_rows(x, self.group, self.receives, self.sends)

    def returned(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, kw_only=True, slots=True)
class ToAll:
    """Every rank is sent all rows: an all-gather, and an all-to-all of equal blocks back, whose sum has float32's accuracy.

    Attributes:
        rows: of each rank, the same number on all.
    """

    group: Group
    rows: int

    @property
    def arriving(self) -> int:
        return self.group.size * self.rows

    def there(self, x: Tensor) -> Pending:
        return all_gather(x, self.group, 0, async_op=True)

    def back(self, x: Tensor) -> Pending:
        return all_to_all(x, self.group, 0, 0, async_op=True)

    def returned(self, x: Tensor) -> Tensor:
        return x.view(self.group.size, self.rows, *x.shape[1:]).sum(0)
