"""Dropout that drops the same elements under every layout.

Whether an element is kept is a function of (seed, call, global element index), so no rank needs to agree with
another about a random state, and nothing is stored for backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold import kernels
from meshfold.mesh import Mesh
from meshfold.mesh.dropout_stream import current_dropout_stream
from meshfold.mesh.names import plain
from meshfold.tensor_parallel.layers.base import ShardedLayer
from meshfold.tensor_parallel.layers.draw import code_of, dealt_place, dealt_rows, draw
from meshfold.tensor_parallel.modes import Mode

_SEQUENCE = ("seq", "ring", "ulysses")  # axes that sequences may be dealt to


class Dropout(ShardedLayer):
    """nn.Dropout on a local block: of the residual stream, of an MLP's hidden, or of attention weights.

    ``.. h`` to ``.. h``, or ``b heads s t`` to the same. In training it must run inside ``with dropout_stream(seed, step)``.
    """

    def __init__(
        self,
        p: float,
        mesh: Mesh,
        mode: Mode,
        hidden: int,
        name: str = "",
        *,
        inner: int = 0,
        heads: int = 0,
        whole: bool = False,
        flat_tokens: bool = True,
    ) -> None:
        """Args:
        p: probability to drop.
        hidden: size of the residual stream.
        name: of the module in the model; gives each dropout a stream of its own.
        inner: size of the hidden dim that the layer before it writes; 0 if that writes the residual stream. It
            decides where the local widths of the two are the same.
        heads: of the attention it stands in, all ranks' together; 0 if it stands in none.
        whole: what it drops of is the same on every rank.
        flat_tokens: a tensor of two dims is ``m h``, tokens; else ``b h``, one vector a sequence.
        """
        super().__init__()
        self.p, self.mesh, self.hidden, self.name = p, mesh, hidden, plain(name)
        self.inner, self.heads, self.flat_tokens = inner, heads, flat_tokens
        self._code = code_of(self.name)
        self._dealt = mesh.size(*_SEQUENCE) > 1
        residual, between = mode.layout("residual"), mode.layout("hidden")
        self.residual = ((), ()) if whole else (residual["m"], residual["h"])
        self.between = ((), ()) if whole else (between["m"], between["n"])

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x, self.p) if self.training and self.p > 0.0 else x

    def drop(self, x: Tensor, p: float) -> Tensor:
        """Drop elements of ``x`` with probability ``p`` and scale the rest by 1/(1−p)."""
        size, width = self.mesh.size, x.shape[-1]
        if x.dim() == 4 and x.shape[1] * size(*self.between[1]) == self.heads:
            return self.drop_weights(x, p)
        fits_residual = width * size(*self.residual[1]) == self.hidden
        fits_between = width * size(*self.between[1]) == self.inner
        tokens, columns = self.residual if fits_residual and not fits_between else self.between
        rows, first = x.numel() // width, self.mesh.index(*tokens)
        column = self.mesh.index(*columns) * width, width * size(*columns)
        by_tokens = x.dim() == 2 and self.flat_tokens
        seed, key, before = self._draw(x, by_tokens)
        shape = [0] if by_tokens else [*x.shape[1:-1]]
        if isinstance(before, int):
            place: int | Tensor = before * x.shape[1:-1].numel() + first * rows
            if (dealt := current_dropout_stream().dealt) is not None:
                # Without function modes: to one that counts positions, an arange would be tokens.
                with torch._C.DisableTorchFunction():
                    here = torch.arange(first * rows, (first + 1) * rows, device=x.device)
                    place = dealt_rows(here, before, shape, dealt)
                    return kernels.dropout(x, p, seed, key, place, *column)
        else:
            here = first * rows + torch.arange(rows, device=x.device)
            if self._dealt:
                place = dealt_place(here, before, shape)
            else:
                place = before * x.shape[1:-1].numel() + here
        return kernels.dropout(x, p, seed, key, place, *column)

    def drop_weights(self, weights: Tensor, p: float) -> Tensor:
        """The same for attention weights ``b heads s t``: each (b, head, s, t) of the whole model has one fate."""
        b, heads, s, t = weights.shape
        device = weights.device
        seed, key, first, first_head, all_heads = self.draw_weights(weights)
        sequence = torch.arange(b, device=device) + first
        head = torch.arange(heads, device=device) + first_head
        place = torch.arange(s, device=device)
        rows = ((sequence[:, None, None] * all_heads + head[:, None]) * s + place).reshape(-1)
        return kernels.dropout(weights.reshape(-1, t), p, seed, key, rows, 0, t).view(b, heads, s, t)

    def draw_weights(self, x: Tensor) -> tuple[int | Tensor, int | Tensor, int | Tensor, int, int]:
        """What the fates of this rank's attention weights follow from, ``b heads ..`` being those of ``x``: draws a key.

        Returns:
            (seed, key, number of the first sequence in the global batch, number of the first head, heads of the model).
        """
        b, heads = x.shape[:2]
        tokens, columns = self.between
        seed, key, before = self._draw(x, False)
        index = self.mesh.index
        return (
            seed,
            key,
            before + index(*tokens) * b,
            index(*columns) * heads,
            heads * self.mesh.size(*columns),
        )

    def _draw(self, x: Tensor, by_tokens: bool) -> tuple[int | Tensor, int | Tensor, int | Tensor]:
        """(seed, key, the rows or tokens of the global batch before this forward's)."""
        if torch.compiler.is_compiling():
            seed, key, first_row, first_token = draw(x, self._code)
            return seed, key, first_token if by_tokens else first_row
        stream = current_dropout_stream()
        return stream.seed, stream.next_key(self.name), stream.first_token if by_tokens else stream.first_row

    def extra_repr(self) -> str:
        return f"p={self.p}"
