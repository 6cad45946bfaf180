"""Transitions: the update that each position of a tensor has by itself, some positions at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.memory import MemorySettings, Parts, run_parts, some_lines
from meshfold.folding.primitives import LayerNorm, Linear
from meshfold.folding.shapes import flat, flat_target
from meshfold.folding.state_names import accept_names


class Transition(nn.Module):
    """``linear_2(relu(linear_1(norm(x))))``, Algorithms 9 and 15 of AlphaFold 2: for the MSA and for pairs."""

    def __init__(self, c: int, n: int) -> None:
        """``c``: channels; the hidden width is ``n`` times that."""
        super().__init__()
        self.layer_norm = LayerNorm(c)
        self.linear_1 = Linear(c, n * c, init="relu")
        self.linear_2 = Linear(n * c, c, init="final")
        openfold_3 = {"transition_mlp.layers.0.0.": "linear_1.", "transition_mlp.linear_out.": "linear_2."}
        accept_names(self, openfold_3)

        self.axes: Axes = WHOLE

    def forward(self, x: Tensor, mask: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """``.. c -> .. c``, some positions at a time; ``mask``, ``..``, multiplies the result, which is added to ``into``."""
        numbers = 2 * x.shape[-1] + 2 * self.linear_1.out_features
        return run_positions(self.axes.memory, self._update, x, mask, numbers, into)

    def _update(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear_2(torch.relu(self.linear_1(self.layer_norm(x))))
        return y


class SwiGLU(nn.Module):
    """``silu(linear_a(x)) · linear_b(x)``."""

    def __init__(self, c_in: int, c_out: int) -> None:
        """``c_in``, ``c_out``: channels."""
        super().__init__()
        self.linear_a = Linear(c_in, c_out, bias=False, init="relu")
        self.linear_b = Linear(c_in, c_out, bias=False, init="relu")

    def forward(self, x: Tensor) -> Tensor:
        """``.. c_in -> .. c_out``."""
        y: Tensor = functional.silu(self.linear_a(x)) * self.linear_b(x)
        return y


class SwiGLUTransition(nn.Module):
    """``linear_out(swiglu(norm(x)))``, Algorithm 11 of AlphaFold 3."""

    def __init__(self, c_in: int, n: int) -> None:
        """``c_in``: channels; the hidden width is ``n`` times that."""
        super().__init__()
        self.layer_norm = LayerNorm(c_in)
        self.swiglu = SwiGLU(c_in, n * c_in)
        self.linear_out = Linear(n * c_in, c_in, bias=False, init="final")

        self.axes: Axes = WHOLE

    def forward(self, x: Tensor, mask: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """``.. c -> .. c``, some positions at a time; ``mask``, ``..``, multiplies the result, which is added to ``into``."""
        numbers = 2 * x.shape[-1] + 4 * self.swiglu.linear_a.out_features
        return run_positions(self.axes.memory, self._update, x, mask, numbers, into)

    def _update(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear_out(self.swiglu(self.layer_norm(x)))
        return y


def run_positions(
    memory: MemorySettings,
    update: Callable[[Tensor], Tensor],
    x: Tensor,
    mask: Tensor | None,
    numbers: int,
    into: Tensor | None,
) -> Tensor:
    """Compute an update that each position of ``.. c`` has by itself, some at a time.

    Args:
        memory: the settings.
        update: ``n c -> n c``.
        x: its input.
        mask: ``..``, multiplies the update; None: none.
        numbers: of a position, in intermediates.
        into: what the update is added to, in place, without gradients only; None: the update is returned.
    """
    lines, target = flat(x, 1), flat_target(into, 1)
    mask = None if mask is None else mask.reshape(-1, 1)

    def compute(first: int, size: int) -> Tensor:
        y = update(some_lines(lines, 0, first, size))
        return y if mask is None else y * mask.narrow(0, first, size)

    y = run_parts(Parts.of(memory, lines.shape[0], numbers * x.element_size()), compute, 0, target)
    return y.view(x.shape) if into is None else into
