"""What the twins of Adam define. Everything is flat and contiguous, checked before, and updated in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from meshfold.kernels.adam.scalars import Scalars

if TYPE_CHECKING:
    from meshfold.kernels.adam.states import QuantizedState, SplitState, WholeState

PARAMETERS, MOMENTS = 1, 2  # what a step writes: one, the other, or their sum


class AdamKernels(Protocol):
    """A twin: a module with these functions.

    ``grad_scale`` multiplies the gradient first: a float that float32 holds, or a float32 tensor of one element.
    ``noise`` is the state of the stream of random bits, ``start`` the global number of the first element, ``writes``
    a sum of ``PARAMETERS`` and ``MOMENTS``. ``before`` is None, or what a whole step reads in place of ``state``, which it
    then only writes.
    """

    def split_master(self, x: Tensor, hi: Tensor, lo: Tensor) -> None:
        """Writes ``hi`` and ``lo``."""

    def join_master(self, hi: Tensor, lo: Tensor, x: Tensor) -> None:
        """Writes ``x``."""

    def step_whole(
        self,
        state: WholeState,
        grad: Tensor,
        scalars: Scalars,
        grad_scale: float | Tensor,
        writes: int,
        before: WholeState | None = None,
    ) -> None:
        """A step of float32 parameters."""

    def step_split(
        self,
        state: SplitState,
        grad: Tensor,
        scalars: Scalars,
        grad_scale: float | Tensor,
        writes: int,
        noise: int,
        start: int,
        before: SplitState | None = None,
    ) -> None:
        """A step of split masters; bfloat16 moments are rounded stochastically."""

    def step_quantized(
        self,
        state: QuantizedState,
        grad: Tensor,
        scalars: Scalars,
        grad_scale: float | Tensor,
        writes: int,
        noise: int,
        start: int,
        before: QuantizedState | None = None,
    ) -> None:
        """A step of split masters with 8-bit moments."""
