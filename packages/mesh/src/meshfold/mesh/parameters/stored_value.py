"""A value as it lies in memory, for whoever copies it later: which tensors, and what makes the value of their copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


def the_only_one(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensor of a value that is kept as one tensor."""
    (tensor,) = tensors
    return tensor


class StoredValue(NamedTuple):
    """The tensors that a value is kept in, none of them copied: they change when the value does.

    Attributes:
        tensors: on any device.
        whole: makes the value of them, or of copies of them on another device.
    """

    tensors: tuple[Tensor, ...]
    whole: Callable[[Sequence[Tensor]], Tensor] = the_only_one

    @property
    def is_plain(self) -> bool:
        """True if the value is the one tensor, so that a view of it is kept in a view of that."""
        return self.whole is the_only_one

    def made(self) -> Tensor:
        """Return the value as it is now."""
        return self.whole(self.tensors)
