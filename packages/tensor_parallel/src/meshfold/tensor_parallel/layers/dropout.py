"""Dropout that drops the same elements under every layout.

Whether an element is kept is a function of (seed, call, global element index), so no rank needs to agree with
another about a random state, and nothing is stored for backward. The positions of a tensor's elements are found in the tracked
forward (:mod:`meshfold.mesh.tracking`), or from its sizes if none is tracked.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshfold import kernels
from meshfold.mesh import Mesh
from meshfold.mesh.parameters import uncompiled_name
from meshfold.mesh.random import key_of, next_dropout_draw
from meshfold.mesh.tracking import Tracker, tracker
from meshfold.tensor_parallel.layers.base import BatchShape, ShardedLayer
from meshfold.tensor_parallel.layers.element_positions import (
    GlobalBatch,
    Positions,
    Run,
    block_of,
    fitted_positions,
    followed_positions,
    numbers_of,
    prepare_global_token_numbers,
)
from meshfold.tensor_parallel.modes import Mode

_SEQUENCE = ("seq", "ring", "ulysses")  # axes that may split sequences


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
        batch: BatchShape | None = None,
    ) -> None:
        """Args:
        p: probability to drop.
        hidden: size of the residual stream.
        name: of the module in the model; gives each dropout a stream of its own.
        inner: size of the hidden dim that the layer before it writes; 0 if that writes the residual stream. It
            decides if the local widths of the two are equal.
        heads: of the attention that contains it, over all ranks; 0 if none does.
        whole: its input is the same on every rank.
        flat_tokens: a tensor of two dims is ``m h``, tokens; else ``b h``, one vector a sequence.
        batch: of the forward that runs.
        """
        super().__init__()
        self.p, self.mesh, self.hidden, self.name = p, mesh, hidden, uncompiled_name(name)
        self.inner, self.heads, self.flat_tokens = inner, heads, flat_tokens
        self._code, self._batch = _code_of(self.name), batch or BatchShape()
        self._splits_sequences = mesh.size(*_SEQUENCE) > 1
        self._seen: dict[int, Positions] = {}  # by the call's number in a forward
        residual, between = mode.layout("residual"), mode.layout("hidden")
        self.residual = ((), ()) if whole else (residual["m"], residual["h"])
        self.between = ((), ()) if whole else (between["m"], between["n"])

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x, self.p) if self.training and self.p > 0.0 else x

    def drop(self, x: Tensor, p: float) -> Tensor:
        """Drop elements of ``x`` with probability ``p`` and scale the rest by 1/(1−p).

        Raises:
            LayoutError: if the batch is part of a larger one and the positions of its rows in ``x`` are unknown.
        """
        found = None if torch.compiler.is_compiling() else tracker()
        seed, key, batch, call = self._draw(x)
        if found is not None and found.rows.follows:
            self._look(found, x, call, batch)
        place = self._remembered(x, call, batch) or self._guessed(x, batch)
        return self._dropped(x, p, place, seed, key, batch)

    def drop_weights(self, weights: Tensor, p: float) -> Tensor:
        """Drop attention weights ``b heads s t``: each (b, head, s, t) is dropped on all ranks or on none."""
        seed, key, batch, _ = self._draw(weights)
        return self._dropped(weights, p, self._of_weights(weights), seed, key, batch)

    def draw_weights(self, x: Tensor) -> tuple[int | Tensor, int | Tensor, int | Tensor, int, int]:
        """Draw the key of this rank's attention weights; ``b heads ..`` are ``x``'s.

        Returns:
            (seed, key, number of the first sequence in the global batch, number of the first head, heads of the model).
        """
        b, heads = x.shape[:2]
        tokens, columns = self.between
        seed, key, batch, _ = self._draw(x)
        index = self.mesh.index
        return (
            seed,
            key,
            batch.first_row + index(*tokens) * b,
            index(*columns) * heads,
            heads * self.mesh.size(*columns),
        )

    def _draw(self, x: Tensor) -> tuple[int | Tensor, int | Tensor, GlobalBatch, int]:
        """Return (seed, key, batch, number) of the next call; in a compiled graph the number is -1."""
        if torch.compiler.is_compiling():
            seed, key, first_row, first_token, rows = _draw_compiled(x, self._code)
            return seed, key, GlobalBatch(first_row, first_token, rows, self._batch, None), -1
        made = next_dropout_draw(self.name)
        batch = GlobalBatch(made.first_row, made.first_token, made.rows, self._batch, made.token_shards)
        return made.seed, made.key, batch, made.call

    def _dropped(
        self, x: Tensor, p: float, place: Positions, seed: int | Tensor, key: int | Tensor, batch: GlobalBatch
    ) -> Tensor:
        block = block_of(place, batch, self.mesh)
        if block is not None:
            first, start, whole = block
            if isinstance(first, Tensor):  # in a graph, row numbers are computed when it runs
                first = first + torch.arange(x.numel() // x.shape[-1], device=x.device)
            return kernels.dropout(x, p, seed, key, first, start, whole)
        # Without function modes: sequence parallelism would take an arange for token positions.
        with torch._C.DisableTorchFunction():
            *lead, last = place
            columns = block_of((last,), batch, self.mesh)
            if columns is None:
                numbers = numbers_of(place, batch, self.mesh, x.device)
                return kernels.dropout(x.reshape(-1, 1), p, seed, key, numbers, 0, 1).view(x.shape)
            numbers = numbers_of(lead, batch, self.mesh, x.device)
            return kernels.dropout(x, p, seed, key, numbers, *columns[1:])

    # -- where elements lie ---------------------------------------------------------------------------------------------

    def _look(self, found: Tracker, x: Tensor, call: int, batch: GlobalBatch) -> None:
        """Remember the positions of a tensor's elements for the same call in later forwards."""
        sequence_axes = () if found.token_split is None else found.token_split.axes
        place = followed_positions(
            x, found.dims(x), found.rows.dims(x), self._guessed(x, batch), batch, self.mesh, sequence_axes, self.name
        )
        if place is not None:
            self._seen[call] = place
        else:
            self._seen.pop(call, None)

    def _remembered(self, x: Tensor, call: int, batch: GlobalBatch) -> Positions | None:
        """Return the positions tracked for this call, or for a similar one; None if none were tracked."""
        place = self._seen.get(call)
        if place is None or len(place) != x.dim():
            alike = [seen for seen in self._seen.values() if len(seen) == x.dim()]
            wide = [seen for seen in alike if seen[-1][-1].size == x.shape[-1]]
            place = next(iter(wide or alike), None)
        return None if place is None else fitted_positions(place, tuple(x.shape), batch, self.mesh)

    def _of_weights(self, x: Tensor) -> Positions:
        tokens, columns = self.between
        return (
            (Run(tokens, "rows", single=True, size=x.shape[0]),),
            (Run(columns, size=x.shape[1]),),
            *((Run(size=n),) for n in x.shape[2:]),
        )

    def _guessed(self, x: Tensor, batch: GlobalBatch) -> Positions:
        """Guess the positions of elements from the tensor's sizes."""
        size, shape, width = self.mesh.size, tuple(x.shape), x.shape[-1]
        if x.dim() == 4 and shape[1] * size(*self.between[1]) == self.heads:
            return self._of_weights(x)
        fits_residual = width * size(*self.residual[1]) == self.hidden
        fits_between = width * size(*self.between[1]) == self.inner
        tokens, columns = self.residual if fits_residual and not fits_between else self.between
        last = (Run(columns, size=width),)
        if x.dim() == 2 and self.flat_tokens:
            return ((Run(tokens, "tokens", token_split=self._splits_sequences, size=shape[0]),), last)
        made = [(Run(size=n),) for n in shape[:-1]]
        if not made:
            return (last,)
        turned = x.dim() > 2 and self.mesh.world_size > 1 and self._tokens_first(shape, size(*tokens))
        rows = 1 if turned else 0  # not a bool as the index: torch 2.11's dynamo cannot trace that
        made[rows] = (Run(tokens, "rows", single=True, size=shape[rows]),)
        if self._splits_sequences and x.dim() > 2:
            at = 0 if turned else len(made) - 1
            made[at] = (made[at][0]._replace(token_split=True),)
        return (*made, last)

    def _tokens_first(self, shape: tuple[int, ...], blocks: int) -> bool:
        """Return True if the second dim has this rank's number of rows, and the first has not."""
        rows = self._batch.rows // blocks
        return rows > 0 and shape[1] == rows != shape[0]

    def extra_repr(self) -> str:
        return f"p={self.p}"


# The current step and call are in a context variable, which torch.compile cannot trace, so a compiled graph has an operation
# that reads them when it runs. A module's name is passed as a number in a tensor: a string constant would compile a separate
# graph for every block.

_NAMES: dict[int, str] = {}


def _code_of(name: str) -> Tensor:
    """Return a number for a name, int64, on the CPU."""
    _prepare_draw()  # must run before tracing
    prepare_global_token_numbers()
    code = key_of(name)
    _NAMES[code] = name
    return torch.tensor(code)


def _draw_compiled(x: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (seed, key, first row, first token, rows) of a name's next dropout, on the device of ``x``."""
    seed, key, first_row, first_token, rows = torch.ops.meshfold.draw(x.detach(), code).unbind()
    return seed, key, first_row, first_token, rows


@cache
def _prepare_draw() -> Any:
    @torch.library.custom_op("meshfold::draw", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def draw(x: Tensor, code: Tensor) -> Tensor:
        made = next_dropout_draw(_NAMES[int(code)])
        numbers = [made.seed, made.key, made.first_row, made.first_token, made.rows]
        return torch.tensor(numbers, dtype=torch.int64).to(x.device, non_blocking=True)

    @draw.register_fake
    def _(x: Tensor, code: Tensor) -> Tensor:
        return x.new_empty(5, dtype=torch.int64)

    return draw
