"""Inputs that fp8 products share: cast once for all layers that read one, and by the kernel that makes it where there is one.

Queries, keys and values read the same input, as gate and up do. An input is recognized by its memory and version, not by names, so
that it works for any model. A norm or a gated activation with an :class:`Fp8Source` counts in one forward how many fp8 products
read its result. From the next forward on its kernel writes the operand with the result. Bits are those of a cast of each product.

=================== ==================================== =======================================
cast                apart                                shared and fused
=================== ==================================== =======================================
x for y             read by each product                 written with x, or read once
x for dw            read twice by each product           read twice by the first
=================== ==================================== =======================================

At most one operand of each kind is kept, and none once all known readers have had it. Compiled code does not use this: the compiler
finds repeated computations, and fuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from meshfold.kernels.dispatch import has_memory
from meshfold.kernels.fp8 import Fp8Casts, Fp8Maximum, Fp8Recipe, Fp8Tensor, scaled_alone

FP8_SOURCE = "fp8_source"
"""Attribute of a module whose result fp8 products may read: its :class:`Fp8Source`."""


@dataclass
class Fp8Source:
    """Notes of one maker of inputs: a norm, an activation, or the first layer that reads an input.

    Attributes:
        readers: number of fp8 products that read its last result; None: not known yet.
        fuses: whether they take the operand that a kernel writes: e4m3, a scale for each row of this rank.
    """

    readers: int | None = None
    fuses: bool = False

    @property
    def writes(self) -> bool:
        """Return True if the operand is to be written with the result."""
        return bool(self.readers) and self.fuses and not _apart


class _Kept:
    """An input, and its cast for products that are still to come."""

    def __init__(self, x: Tensor, source: Fp8Source) -> None:
        self.storage, self.address, self.version = StorageWeakRef(x.untyped_storage()), x.data_ptr(), x._version
        self.shape, self.dtype, self.source = (x.numel() // x.shape[-1], x.shape[-1]), x.dtype, source
        self.rows: Fp8Tensor | None = None
        self.casts: Fp8Casts | None = None
        self.key: tuple[Fp8Recipe, Fp8Maximum | None] | None = None
        self.taken = 0

    def holds(self, x: Tensor) -> bool:
        """Return True if a matrix is this input, unchanged."""
        same = x.data_ptr() == self.address and tuple(x.shape) == self.shape and x.dtype is self.dtype
        return same and x._version == self.version and not self.storage.expired()


_first_readers: Any = WeakIdKeyDictionary()  # by weight
_forward: _Kept | None = None
_backward: tuple[_Kept, int] | None = None  # with the number of products that may still ask
_apart: list[None] = []


@contextmanager
def casts_apart() -> Iterator[None]:
    """Context manager: inside, each product casts its own operands."""
    global _backward
    _close()
    _backward = None
    _apart.append(None)
    try:
        yield
    finally:
        _apart.pop()


def offer_input(x: Tensor, source: Fp8Source, rows: Fp8Tensor | None = None) -> None:
    """Say that a source has made an input of possible fp8 products.

    Args:
        x: ``.. k``, row-major.
        source: of it.
        rows: the operand, where it was written with the input.
    """
    global _forward
    if source.readers == 0 or _apart or not _known(x):
        return
    _close()
    _forward = _Kept(x, source)
    _forward.rows = rows


@contextmanager
def shared_input(
    x: Tensor, weight: Tensor, recipe: Fp8Recipe, maximum: Fp8Maximum | None
) -> Iterator[tuple[Fp8Casts, Fp8Source | None]]:
    """Context manager around a product's forward: the casts of its input, and what made it, for :func:`shared_columns`.

    Args:
        x: ``m k``.
        weight: of the layer: where no source made the input, the first layer that reads it notices how many others do.
        recipe, maximum: of the product.
    """
    global _forward
    if _apart or not _known(x):
        yield Fp8Casts(x, recipe, maximum), None
        return
    kept = _forward
    if kept is None or not kept.holds(x) or kept.key not in (None, (recipe, maximum)):
        _close()
        kept = _forward = _Kept(x, _first_reader(weight))
    alone = scaled_alone(recipe, maximum)
    if kept.casts is None:
        kept.key = recipe, maximum
        kept.casts = Fp8Casts(x, recipe, maximum, rows=kept.rows if alone else None)
        kept.rows = None
    kept.taken += 1
    kept.source.fuses = alone
    yield kept.casts, kept.source
    if kept.taken == kept.source.readers:
        _close()


def shared_columns(x: Tensor, recipe: Fp8Recipe, maximum: Fp8Maximum | None, source: Fp8Source | None) -> Fp8Casts:
    """Return the casts of an input for a product's weight gradient; products that read one input get the same object.

    Args:
        x: ``m k``, as it was in forward.
        recipe, maximum: of the product.
        source: from :func:`shared_input`.
    """
    global _backward
    readers = 0 if source is None else source.readers or 0
    if source is None or readers < 2 or _apart or not _known(x):
        return Fp8Casts(x, recipe, maximum)
    if _backward is not None:
        kept, left = _backward
        if kept.holds(x) and kept.key == (recipe, maximum) and kept.casts is not None:
            _backward = (kept, left - 1) if left > 1 else None
            return kept.casts
    kept = _Kept(x, source)
    kept.key, kept.casts = (recipe, maximum), Fp8Casts(x, recipe, maximum)
    _backward = kept, readers - 1
    return kept.casts


def _first_reader(weight: Tensor) -> Fp8Source:
    found: Fp8Source | None = _first_readers.get(weight)
    if found is None:
        found = _first_readers[weight] = Fp8Source()
    return found


def _known(x: Tensor) -> bool:
    """Return True for a tensor whose memory and version say what it is."""
    if torch.compiler.is_compiling() or not has_memory(x):
        return False
    return not x.is_meta and not x.is_inference() and x.numel() > 0 and x.is_contiguous()


def _close() -> None:
    """Note how many products have read the last input, and release its cast."""
    global _forward
    kept, _forward = _forward, None
    if kept is None:
        return
    kept.source.readers = kept.taken
    if kept.casts is not None:
        kept.casts.free_rows()
