"""Attention between the way in and the way out: over the ranks of a sequence, and again where it is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from meshfold.engine.batches.packed import Documents
from meshfold.engine.sequence.incoming import Forward
from meshfold.engine.world.world import World
from meshfold.mesh import LayoutError
from meshfold.sequence import WeightDropout, sequence_parallel
from meshfold.tensor_parallel import find_mode
from meshfold.tensor_parallel.convert import find_functional_dropout, row_multiple

if TYPE_CHECKING:
    from meshfold.tensor_parallel.convert import FunctionalDropout

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class SplitAttention:
    """A model's attention, carried out over the ranks until it is closed."""

    def __init__(self, model: nn.Module, world: World, mode: str | Callable[..., object]) -> None:
        """Args:
        model: this rank's part.
        world: where it lies.
        mode: of the entry ``sequence``.
        """
        self._model, self._world = model, world
        calls = find_functional_dropout(model)
        draw = None if calls is None else partial(_drawn, calls)
        self._parallel = sequence_parallel(model, world.mesh, mode, draw=draw)

    def begin(self, now: Forward) -> None:
        """Say what the forward under way is of."""
        documents = None if now.documents is None else self._attended(now.documents, now)
        self._parallel.set_batch(length=now.dealing.length, documents=documents)

    def close(self) -> None:
        """Leave the model as it was."""
        self._parallel.remove()

    def repeated(self, contexts: Contexts) -> Contexts:
        """The contexts of a checkpoint with what repeated attention needs."""

        def both() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            first, again = contexts()
            # Attention is asked for before dropout by function is, as in the forward.
            return first, _Both(again, self._parallel.again())

        return both

    def _attended(self, documents: Documents, now: Forward) -> Documents:
        """Documents of the rows that attention has here.

        A tensor mode may split the batch between sequences, filled up with copies of its last row.
        """
        if len(documents) == 1 or self._world.mode is None:
            return documents
        unit, mesh = row_multiple(self._model, now.dealing.local), self._world.mesh
        rows = -(-now.rows // unit) * unit
        axes = find_mode(self._world.mode).layout("hidden")["m"]  # type: ignore[arg-type]
        each = rows // mesh.size(*axes)
        first = each * mesh.index(*axes)
        return (*documents, *documents[-1:] * (rows - now.rows))[first : first + each]


def _drawn(calls: FunctionalDropout, q: Tensor, p: float) -> WeightDropout:
    """Return the dropout of the next attention's weights: the same as in one process."""
    if calls.part is None:
        raise LayoutError("attention that drops weights ran outside of the model that it is part of")
    seed, key, first_row, first_head, heads = calls.part.draw_weights(q)
    return WeightDropout(p=p, seed=seed, key=key, heads=heads, first_row=first_row, first_head=first_head)


class _Both:
    """Two contexts, one in the other, as often as they are entered."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._outer)
            stack.enter_context(self._inner)
            self._open.append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self._open.pop().close()
