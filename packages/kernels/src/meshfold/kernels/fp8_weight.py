"""A weight in fp8 that several products of a step read: cast once for all of them, including micro-batches and recomputed forwards.

A weight is an operand of two products, each with a cast of its own: y sums over k, dx over n. Both together take two bytes an
element. They are kept from :meth:`Fp8Weight.open` on, and made again if the weight has changed. They hold no views of the weight,
which may move. A compiled graph reads them as inputs, so they must exist: call :meth:`Fp8Weight.refresh` before it.

Or other code supplies them (:meth:`Fp8Weight.supply`): ranks that share a weight gather it in fp8, and none has the weight itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.fp8 import Fp8Dim, Fp8Maximum, Fp8Recipe, Fp8Tensor, fp8_cast_weight
from meshfold.kernels.fp8_casts import turn

Fp8Operands = tuple[Tensor, Tensor, Tensor, Tensor]
"""Values and inverse scales of w ``n k``, for y, and of its transpose ``k n``, for dx: row-major, or a view of ``n k``."""


class Fp8WeightError(RuntimeError):
    """A weight that travels in fp8 was read by something other than its layer's product, or while it was released."""


class Fp8Weight:
    """The operands of one weight.

    Attributes:
        operands: the present ones; None while the products cast the weight themselves.
        casts: number of times that they were made.
        cast: :func:`meshfold.kernels.fp8.fp8_cast_weight`, or its compiled version.
        recipe: scales and formats.
        name: of the weight, for messages.
        present: whether supplied operands exist now, one or both, and the weight itself does not.
        readable: whether the operand for y is among them.
    """

    def __init__(self, recipe: Fp8Recipe, maximum: Fp8Maximum | None = None) -> None:
        """Args:
        recipe: scales and formats.
        maximum: takes an amax over the ranks that hold the rest of the weight; None if there are none.
        """
        self.operands: Fp8Operands | None = None
        self.casts = 0
        self.cast = fp8_cast_weight
        self.recipe, self._maximum = recipe, maximum
        self.name, self.present, self.readable = "weight", False, False
        self._fetch: Callable[[], None] = lambda: None
        self._open = self._supplied = False
        self._of: tuple[int, int] | None = None  # address and version of the weight that was cast

    def supply(self, operands: Fp8Operands | None, fetch: Callable[[], None] = lambda: None) -> None:
        """Use these operands from now on; other code changes their contents; None: cast the weight again.

        ``fetch``: makes the operand for y readable, where a forward is repeated in a backward that has only that for dx.
        """
        self.operands, self._supplied, self._of = operands, operands is not None, None
        self._fetch = fetch

    @property
    def encodings(self) -> int:
        """Number of ways in which its products round it: one with a scale for the tensor, two with scales of rows."""
        return 2 if self.recipe.rows else 1

    def check_unread(self) -> None:
        """Raises:
        Fp8WeightError: if the weight itself is not there, because it travels in fp8.
        """
        if self.present:
            raise Fp8WeightError(
                f"{self.name!r} was read in a forward or backward, where its ranks have gathered it in fp8, for its layer's own "
                "product alone. Write precision=dict(..., gather='bf16'), with which weights travel in bf16, or "
                f"keep=('head', 'router', {self.name.removesuffix('.weight')!r}), with which this layer multiplies in bf16"
            )

    def over_ranks(self, amax: Tensor, dims: tuple[Fp8Dim, ...]) -> Tensor:
        """Return the amax of the whole weight: the maximum over the ranks that hold its other parts along these dims."""
        reduces = getattr(self._maximum, "reduces", None)
        if self._maximum is None or (reduces is not None and not reduces(dims)):
            return amax
        return self._maximum(amax, dims)

    def open(self) -> None:
        """Release the cast operands, and keep those cast from now on."""
        self.close()
        self._open = True

    def close(self) -> None:
        """Release the cast operands, and cast nothing: products do it themselves."""
        if not self._supplied:
            self._open, self.operands, self._of = False, None, None

    def refresh(self, weight: Tensor) -> Fp8Operands | None:
        """Return the operands of a weight, cast now if they are not yet; None while closed.

        All ranks that share the weight must call: scales are reduced over them.

        Raises:
            Fp8WeightError: for supplied operands that are not there.
        """
        if self._supplied:
            if self.present and not self.readable:
                self._fetch()
            if not self.readable:
                raise Fp8WeightError(
                    f"{self.name!r} is used while it is released: under zero stage 3 a weight exists only while its "
                    "module, or the block around it, is called. Call the block, or use stage 2"
                )
            return self.operands
        if not self._open or weight.is_meta or torch.is_inference_mode_enabled():
            return None
        now = weight.data_ptr(), weight._version
        if self._of != now:
            with torch.no_grad():
                a, b = self.cast(weight.detach(), self.recipe, self._maximum)
            self.operands, self._of = (a.values, a.inverse, b.values, b.inverse), now
            self.casts += 1
        return self.operands

    def get(self, weight: Tensor) -> Fp8Operands | None:
        """Return the operands for a product in eager code or in a graph being traced; None: the product casts the weight itself."""
        return self.operands if torch.compiler.is_compiling() else self.refresh(weight)


def fp8_operand(values: Tensor, inverse: Tensor, recipe: Fp8Recipe, behind: Tensor | None = None) -> Fp8Tensor:
    """Return a weight's operand of its parts; values that are a view of the transpose are turned.

    ``behind``: a gradient that exists once the operand may be read. A compiler sees that the operand depends on nothing else
    in the backward. It would transpose the operand in the forward, before a gathered one exists.
    """
    if not values.is_contiguous():
        if behind is not None and torch.compiler.is_compiling():
            values, inverse = _turned_behind(values.t(), inverse, behind)
        else:
            values = dispatch.twin(turn, inverse)(values.t(), inverse)
    return Fp8Tensor(values=values, inverse=inverse, tile=(recipe.block, recipe.block) if recipe.block else None)


@torch.library.custom_op("meshfold::fp8_turned_behind", mutates_args=())
def _turned_behind(values: Tensor, inverse: Tensor, behind: Tensor) -> tuple[Tensor, Tensor]:
    return dispatch.twin(turn, inverse)(values, inverse), inverse.clone()


@_turned_behind.register_fake
def _(values: Tensor, inverse: Tensor, behind: Tensor) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape[1], values.shape[0]), torch.empty_like(inverse)
