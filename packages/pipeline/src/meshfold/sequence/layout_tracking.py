"""Layouts of tensors under sequence parallelism, for the forward in which a model's own code is tracked.

See :mod:`meshfold.mesh.tracking`. A model's inputs have a rank's tokens in dim 1; only attention looks across ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from meshfold.mesh import Mesh
from meshfold.mesh.tracking import (
    Dim,
    Factor,
    Split,
    Tracker,
    is_split,
    is_unknown,
    tracker,
    untracked,
    whole_dims,
)


class ShardedSequenceLayout:
    """The layout that a model with sharded sequences reports to :func:`meshfold.mesh.tracking.track_forwards`."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self._split = Split(tuple(axis for axis in axes if mesh.size(axis) > 1), "tokens")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedSequenceLayout:
        return self

    def begin(self, found: Tracker, model: nn.Module, given: Mapping[str, Any]) -> None:
        """Begin a forward: tokens are not sharded yet. Code for masks and caches is ignored, since neither is used."""
        found.overlooked = ("transformers/masking_utils.py", "transformers/cache_utils.py")

    def mark_arguments(self, given: Iterable[Any], local: int) -> None:
        """Mark the model's arguments, which have this many tokens of this rank each."""
        found = tracker()
        if found is None or not self._split.axes:
            return
        found.token_split, found.local_tokens = self._split, local
        found.random_axes = (*found.random_axes, *self._split.axes)
        for value in given:
            if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == local:
                dims = list(found.dims(value))
                dims[1] = (Factor(local, self._split),)
                found.mark(value, tuple(dims))

    def positions(self, made: Tensor) -> None:
        """Mark a tensor that holds the positions of this rank's tokens in its last dim."""
        found = tracker()
        if found is not None and self._split.axes:
            shape = tuple(made.shape)
            found.mark(made, (*whole_dims(shape[:-1]), (Factor(shape[-1], self._split),)))

    def parameter_dims(self, parameter: Tensor) -> None:
        """Return None: parameters are whole."""

    def reads_shapes(self, module: nn.Module) -> bool:
        """Return False: this layout knows no such module."""
        return False

    def made_later(self, found: Tracker, module: nn.Module, given: Tensor, shape: tuple[int, ...]) -> None:
        """Never called: no module of a model communicates."""

    def summed_later(
        self, found: Tracker, module: nn.Module, given: Tensor, layout: tuple[Dim, ...]
    ) -> tuple[str, ...]:
        """Never called, either."""
        return ()

    def communicates(self, module: nn.Module) -> bool:
        """Return True if a module is a loss that knows that its labels are sharded."""
        return bool(getattr(module, "causal_lm_loss", False))

    def check_arguments(
        self, found: Tracker, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Do nothing: a loss takes this rank's tokens."""

    def mark_results(
        self, found: Tracker, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Do nothing: the loss of this rank's tokens is weighted together with the other ranks'."""

    def remedy(self, name: str, axes: tuple[str, ...]) -> str:
        """Return advice to use another spec: no rule gathers a sequence."""
        if not set(axes) & set(self._split.axes):
            return ""
        return (
            "With split sequences, only attention by torch.nn.functional.scaled_dot_product_attention sees the tokens of other "
            "ranks: use a spec without sequence, such as dict(tensor=2) or dict(pipeline=2)"
        )


def track_attention(q: Tensor, k: Tensor, v: Tensor, attend: Callable[[], Tensor]) -> Tensor:
    """Check that attention over ranks sees the sharded tokens, and mark its output: ``b heads s d`` -> ``b s heads d``."""
    found = tracker()
    if found is None or found.token_split is None:
        return attend()
    layouts = [found.dims(x) for x in (q, k, v)]
    for what, x, dims in zip(("queries", "keys", "values"), (q, k, v), layouts, strict=True):
        if any(map(is_unknown, dims)):
            continue
        if not _has_tokens(dims[2], found.token_split):
            found.refuse(
                "scaled_dot_product_attention",
                f"gets {what} whose dim 2 is not the split dim of tokens",
                x,
                axes=found.token_split.axes,
            )
        if is_split(dims[3]):
            found.refuse(
                "scaled_dot_product_attention",
                f"attends with shards of {what}",
                x,
                axes=found.token_split.axes,
            )
    with untracked():
        out = attend()
    dims = layouts[0]
    tokens = (Factor(out.shape[1], found.token_split),) if is_unknown(dims[2]) else dims[2]
    found.mark(out, (dims[0], tokens, dims[1], *whole_dims(out.shape[3:])))
    found.rows.keep(out, q)
    return out


def _has_tokens(dim: Dim, token_split: Split) -> bool:
    return len(dim) == 1 and dim[0].split is not None and set(token_split.axes) <= set(dim[0].split.axes)
