"""Dropout that drops the same elements under every layout.

Whether an element is kept is a function of (seed, call, global element index), so no rank needs to agree with
another about a random state, and nothing is stored for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshfold import kernels
from meshfold.mesh import Mesh
from meshfold.mesh.dropout_stream import current_dropout_stream
from meshfold.tensor_parallel.modes import Mode


class Dropout(nn.Module):
    """nn.Dropout on a local block: of the residual stream, or of an MLP's hidden if the width says so.

    ``.. h`` to ``.. h``. In training it must run inside ``with dropout_stream(seed, step)``.
    """

    def __init__(self, p: float, mesh: Mesh, mode: Mode, hidden: int, name: str = "", *, whole_tokens: bool = False) -> None:
        """Args:
            p: probability to drop.
            hidden: size of the residual stream.
            name: of the module in the model; gives each dropout a stream of its own.
            whole_tokens: the stream has all tokens on every rank here, whatever the mode says.
        """
        super().__init__()
        self.p, self.mesh, self.mode, self.hidden, self.name = p, mesh, mode, hidden, name
        self.whole_tokens = whole_tokens

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return self.drop(x, self.p)

    def drop(self, x: Tensor, p: float) -> Tensor:
        """Drop elements of ``x`` with probability ``p`` and scale the rest by 1/(1−p)."""
        residual, inner = self.mode.layout("residual"), self.mode.layout("hidden")
        if x.shape[-1] * self.mesh.size(*residual["h"]) == self.hidden:
            tokens, columns = residual["m"], residual["h"]
        else:
            tokens, columns = inner["m"], inner["n"]
        rows = x.numel() // x.shape[-1]
        first_row = 0 if self.whole_tokens else self.mesh.index(*tokens) * rows
        first_column = self.mesh.index(*columns) * x.shape[-1]
        stream = current_dropout_stream()
        return kernels.dropout(
            x, p, stream.seed, stream.next_key(self.name), first_row, first_column, x.shape[-1] * self.mesh.size(*columns), True
        )

    def extra_repr(self) -> str:
        return f"p={self.p}"


class FunctionalDropout(TorchFunctionMode):
    """Sends ``torch.nn.functional.dropout`` calls of a model's own code through :class:`Dropout`."""

    def __init__(self, dropout: Dropout) -> None:
        super().__init__()
        self.dropout = dropout

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            return self._drop(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self.dropout.drop(input, p) if training and p > 0.0 else input
