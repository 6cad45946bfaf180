"""A weight in fp8 that several products of a step read: cast once for all of them, by micro-batches and recomputed forwards alike.

A weight is an operand of two products, each with a cast of its own: y sums over k, dx over n. Both together take two bytes an
element. They are kept from :meth:`Fp8Weight.open` on, and made again if the weight has changed. They hold no views of the weight,
which may move. A compiled graph reads them as inputs, and must find them there: call :meth:`Fp8Weight.refresh` in front of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.kernels.fp8 import Fp8Maximum, Fp8Recipe, Fp8Tensor, fp8_cast_weight

Fp8Operands = tuple[Tensor, Tensor, Tensor, Tensor]
"""Values and inverse scales of w ``n k``, for y, and of its transpose ``k n``, for dx."""


class Fp8Weight:
    """The operands of one weight.

    Attributes:
        operands: the present ones; None while the products cast the weight themselves.
        casts: number of times that they were made.
        cast: :func:`meshfold.kernels.fp8.fp8_cast_weight`, or its compiled version.
    """

    def __init__(self, recipe: Fp8Recipe, maximum: Fp8Maximum | None = None) -> None:
        """Args:
        recipe: scales and formats.
        maximum: takes an amax over the ranks that hold the rest of the weight; None if there are none.
        """
        self.operands: Fp8Operands | None = None
        self.casts = 0
        self.cast = fp8_cast_weight
        self._recipe, self._maximum = recipe, maximum
        self._open = False
        self._of: tuple[int, int] | None = None  # address and version of the weight that was cast

    def open(self) -> None:
        """Release the cast operands, and keep those cast from now on."""
        self.close()
        self._open = True

    def close(self) -> None:
        """Release the cast operands, and cast nothing: products do it themselves."""
        self._open, self.operands, self._of = False, None, None

    def refresh(self, weight: Tensor) -> Fp8Operands | None:
        """Return the operands of a weight, cast now if they are not yet; None while closed.

        Ranks that share the weight call alike: scales are reduced over them.
        """
        if not self._open or weight.is_meta or torch.is_inference_mode_enabled():
            return None
        now = weight.data_ptr(), weight._version
        if self._of != now:
            with torch.no_grad():
                a, b = self.cast(weight.detach(), self._recipe, self._maximum)
            self.operands, self._of = (a.values, a.inverse, b.values, b.inverse), now
            self.casts += 1
        return self.operands

    def get(self, weight: Tensor) -> Fp8Operands | None:
        """Return the operands for a product in eager code or in a graph being traced; None: the product casts the weight itself."""
        return self.operands if torch.compiler.is_compiling() else self.refresh(weight)


def fp8_operand(values: Tensor, inverse: Tensor, recipe: Fp8Recipe) -> Fp8Tensor:
    """Return a weight's operand of its parts."""
    return Fp8Tensor(values=values, inverse=inverse, tile=(recipe.block, recipe.block) if recipe.block else None)
