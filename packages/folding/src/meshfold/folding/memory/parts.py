"""Updates in parts: what is large inside an update is made, used and released for some lines at a time.

A part has no effect on another one. In training each part is recomputed in backward if the settings say so. At inference a
part may be added to the residual in place, so that the update is never whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshfold.folding.memory.settings import MemorySettings
from meshfold.kernels import count_parts
from meshfold.mesh import checkpoint_contexts
from meshfold.mesh.model_io import DryRun

KEPT_IN_BACKWARD = 3
"""A part's intermediates in its backward, in those of its forward: what it kept, gradients of that, and what these need."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an update.

    Attributes:
        length: lines.
        count: parts; the last one may be shorter.
        recompute: whether backward computes them again.
        multiple: all parts but the last one have a multiple of so many lines.
    """

    length: int
    count: int = 1
    recompute: bool = False
    multiple: int = 1

    @staticmethod
    def of(
        memory: MemorySettings, length: int, line_bytes: int, gradients: bool | None = None, multiple: int = 1
    ) -> Parts:
        """Return the parts that keep to the settings.

        Args:
            memory: the settings.
            length: lines.
            line_bytes: of a line's intermediates in forward.
            gradients: whether a backward follows; None: if autograd records now.
            multiple: of lines in a part, if the settings allow so many.
        """
        gradients = torch.is_grad_enabled() if gradients is None else gradients
        if gradients and not memory.recomputes_updates:  # what is kept whole is made whole
            return Parts(length)
        count = memory.count(length, (KEPT_IN_BACKWARD if gradients else 1) * line_bytes)
        step = -(-length // count)
        if count > 1 and step >= multiple:
            count = -(-length // (step // multiple * multiple))
        else:
            multiple = 1
        return Parts(length, count, gradients, multiple)

    @property
    def is_whole(self) -> bool:
        """True for one part that is not recomputed."""
        return self.count == 1 and not self.recompute

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first line and the number of lines of each part; none is empty."""
        step = max(-(-self.length // self.count), 1)
        step = -(-step // self.multiple) * self.multiple
        return [(first, min(step, self.length - first)) for first in range(0, self.length, step)] or [(0, 0)]


def some_lines(x: Tensor, dim: int, first: int, size: int) -> Tensor:
    """Return lines of a tensor: itself for all of them, because the backward of a view fills a tensor and copies into it."""
    return x if size == x.shape[dim] else x.narrow(dim, first, size)


Compute = Callable[[int, int], Tensor]


def run_parts(parts: Parts, compute: Compute, dim: int, into: Tensor | None = None) -> Tensor:
    """Compute an update in parts.

    Args:
        parts: which.
        compute: returns the part with a first line and a number of lines.
        dim: of the lines, in the update.
        into: what the update is added to, in place; None: the update is returned. Without gradients only.

    Returns:
        The update, or ``into``.
    """
    bounds = parts.bounds
    left = 0  # lines that do not run, in counts of memory
    if _counts_some and len(bounds) > MOST_COUNTED:
        left = bounds[MOST_COUNTED][0]
        left, bounds = parts.length - left, bounds[:MOST_COUNTED]
    some = bounds if _repeats is None or torch.is_grad_enabled() else _repeats(bounds)
    if into is not None:
        for first, size in some:
            into.narrow(dim, first, size).add_(compute(first, size))
        return into
    if torch.is_grad_enabled():
        made = [repeat_in_backward(compute, *some) if parts.recompute else compute(*some) for some in bounds]
        if left:
            made.append(made[0].new_empty(_shape(made[0], dim, left)))
        return made[0] if len(made) == 1 else torch.cat(made, dim)
    if len(bounds) == 1:
        return compute(*bounds[0])
    out: Tensor | None = None
    for first, size in some:
        part = compute(first, size)
        if out is None:
            out = part.new_empty(_shape(part, dim, parts.length))
        out.narrow(dim, first, size).copy_(part)
        del part
    assert out is not None
    return out


def _shape(part: Tensor, dim: int, length: int) -> list[int]:
    shape = list(part.shape)
    shape[dim] = length
    return shape


MOST_COUNTED = 3
_counts_some = False
Repeats = Callable[[Sequence[Any]], Iterable[Any]]
_repeats: Repeats | None = None


@contextmanager
def counting_some_parts() -> Iterator[None]:
    """Context manager for counts of memory on meta tensors: of many parts only the first three run.

    The others are as large, and none is alive beside another one.
    """
    global _counts_some
    before, _counts_some = _counts_some, True
    try:
        with count_parts(lambda parts: parts[:MOST_COUNTED]):
            yield
    finally:
        _counts_some = before


@contextmanager
def counting_parts_once(repeats: Repeats) -> Iterator[None]:
    """Context manager for counts of operators on meta tensors: of equal parts one runs, and counts as many.

    Parts that a backward follows all run, because the backward counts them too.

    Args:
        repeats: yields a part to run, counts it as often as there are equal ones, and then the last part.
    """
    global _repeats
    before, _repeats = _repeats, repeats
    try:
        with count_parts(repeats):
            yield
    finally:
        _repeats = before


def repeat_in_backward(function: Callable[..., Any], *given: Any, draws: bool = False) -> Any:
    """Call a function whose intermediates are not kept: backward calls it again.

    ``draws``: it has dropout, which drops the same elements again.
    """
    return checkpoint(function, *given, use_reentrant=False, context_fn=_contexts, preserve_rng_state=draws)


def _contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    first, again = checkpoint_contexts()
    stand_in = DryRun.active
    return first, again if stand_in is None else _Both(again, stand_in)


class _Both(AbstractContextManager[object]):
    """Context manager of a repetition in a dry run, which counts it as one."""

    def __init__(self, again: AbstractContextManager[object], stand_in: DryRun) -> None:
        self._again, self._stand_in = again, stand_in
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._stand_in.inside())
            stack.enter_context(self._again)
            self._open.append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self._open.pop().close()


def run_block(memory: MemorySettings, run: Callable[..., Any], *given: Any) -> Any:
    """Call a block's forward, again in backward if the settings say so."""
    if memory.recomputes_blocks and torch.is_grad_enabled():
        return repeat_in_backward(run, *given, draws=True)
    return run(*given)


def own_tensor(x: Tensor, given: Tensor) -> Tensor:
    """Return ``x``, or without gradients a copy that may be changed if it shares memory with ``given``."""
    shared = x.untyped_storage()._cdata == given.untyped_storage()._cdata
    return x.clone(memory_format=torch.contiguous_format) if shared and not torch.is_grad_enabled() else x


def add_update(
    x: Tensor, update: nn.Module, *given: Any, dropout: nn.Module | None = None, in_place: bool = False
) -> Tensor:
    """Return ``x + dropout(update(*given))``.

    Args:
        x: the residual stream.
        update: takes ``given`` and ``into``.
        given: its arguments.
        dropout: of the update; None: none.
        in_place: change ``x`` and return it, unless autograd records.
    """
    in_place = in_place and not torch.is_grad_enabled()  # a pipeline records gradients inside of blocks only
    drops = dropout is not None and dropout.training and dropout.p != 0.0
    if in_place and not drops:
        update(*given, into=x)
        return x
    y = update(*given)
    if dropout is not None:
        y = dropout(y)
    return x.add_(y) if in_place else x + y
