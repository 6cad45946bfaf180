"""Checkpoints of torch in a tracked forward: backward repeats the operations that the forward ran.

A tracked forward leaves a model its own operations, where fused kernels (meshfold.kernels.fuse) would run otherwise. They save
other tensors, which torch's checkpoint refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode

_GENERATOR = "_checkpoint_without_reentrant_generator"
"""Function that every checkpoint calls that saves its inputs, whoever imported ``checkpoint`` from where."""

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@contextmanager
def repeated_alike() -> Iterator[None]:
    """Context manager: what is checkpointed inside is repeated with the model's own operations."""
    before: Any = getattr(checkpoints, _GENERATOR)

    def generator(function: Any, preserves: bool, context_fn: Contexts, *others: Any, **kwargs: Any) -> Any:
        return before(function, preserves, _with_own_operations(context_fn), *others, **kwargs)

    setattr(checkpoints, _GENERATOR, generator)
    try:
        yield
    finally:
        setattr(checkpoints, _GENERATOR, before)


def _with_own_operations(context_fn: Contexts) -> Contexts:
    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = context_fn()
        return first, _Repetition(again)

    return contexts


class _OwnOperations(TorchDispatchMode):
    """Says what a tracker says to fused kernels, and changes nothing else."""

    wants_own_operations = True

    is_off = True

    def layout_later(self, head: nn.Module, x: Tensor, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Return a layout that nobody reads: the logits waited in the tracked forward too."""
        return ()

    def moves_rows(self, x: Tensor, layout: tuple[Any, ...]) -> bool:
        """Return False: nobody reads a layout."""
        return False

    def logits_of(self, rows: Tensor, words: int, run: Callable[[], Tensor]) -> Tensor:
        """Return what ``run`` computes."""
        return run()

    def gathered_later(self, head: nn.Module, x: Tensor, numbers: Tensor, layout: tuple[Any, ...]) -> None:
        """Note nothing: what the tracked forward noted holds."""

    def loss_of(
        self, rows: Tensor, target: Tensor, kept: int | None, run: Callable[[], Tensor], parts: Tensor | None = None
    ) -> Tensor:
        """Return what ``run`` computes."""
        return run()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Repetition:
    """Context of a repetition, around another; may be entered again for another backward."""

    def __init__(self, other: AbstractContextManager[Any]) -> None:
        self._other = other
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(repeated_alike())  # checkpoints inside of checkpoints
            stack.enter_context(_OwnOperations())
            stack.enter_context(self._other)
            self._open.append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self._open.pop().close()
