"""Outputs of a split model that are gathered when they are read: logits, beside a loss that the model computes itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor
from torch.nn import functional as F

from meshfold.kernels.fuse import LazyLogits
from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.collectives import take_block
from meshfold.mesh.model_io import ShardedOutput, lazy_gather
from meshfold.mesh.tracking import axes_of, is_unknown, tracker
from meshfold.tensor_parallel.convert.stream_layout import spanning_axes
from meshfold.tensor_parallel.layers.base import OnMesh
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.modes import Mode, vocabulary_multiple


class LazyOutputs(OnMesh):
    """Finder of logits among a model's outputs: by their layout in a tracked forward, and by their size."""

    def __init__(self, mesh: Mesh, mode: Mode, heads: Sequence[Linear]) -> None:
        """Args:
        mesh, mode: how logits lie.
        heads: the layers that make them.
        """
        self.mesh, self._mode = mesh, mode
        layout, multiple = mode.layout("logits"), vocabulary_multiple(mode, mesh)
        self._tokens, self._words = spanning_axes(mesh, layout["m"]), spanning_axes(mesh, layout["v"])
        blocks = mesh.size(*self._words)
        self._heads = {math.ceil(head.out_features / multiple) * multiple // blocks: head for head in heads}
        self._seen: dict[tuple[str, int], tuple[tuple[str, ...] | None, ...]] = {}

    def gather_when_read(self, name: str, value: Tensor, rows: int, padded: int) -> Tensor | None:
        """Return a split output as a tensor that is gathered when it is read; None if it is not split.

        Args:
            name: of the output.
            value: this rank's piece of it.
            rows, padded: of the batch, and of the padded batch.
        """
        if value.is_meta or self.mesh.size(*self._mode.axes) == 1:
            return None
        split = self._split(name, value)
        head = self._heads.get(value.shape[-1]) if value.dim() > 1 else None
        if head is not None and (split is None or (split[-1] in (None, self._words) and not any(split[1:-1]))):
            pieces = self._pieces(name, value, head, rows, padded)
            if isinstance(value, LazyLogits):
                return value.finished(pieces.shape, lambda values: lazy_gather(values, pieces))
            return lazy_gather(value, pieces)
        axes = tuple(dict.fromkeys(axis for dim in split or () for axis in dim or ()))
        return lazy_gather(value, self._refused(name, value, axes)) if axes else None

    def _split(self, name: str, value: Tensor) -> tuple[tuple[str, ...] | None, ...] | None:
        """Return the axes that split each dim of an output, None for an unknown dim; None if no forward was tracked."""
        found, key = tracker(), (name, value.dim())
        if found is not None:
            self._seen[key] = tuple(
                None if is_unknown(dim) else tuple(a for a in axes_of(dim) if a in self._mode.axes)
                for dim in found.dims(value)
            )
        return self._seen.get(key)

    def _pieces(self, name: str, value: Tensor, head: Linear, rows: int, padded: int) -> ShardedOutput:
        first, columns = (
            value.shape[0] * self.mesh.size(*self._tokens),
            value.shape[-1] * self.mesh.size(*self._words),
        )
        kept = first if rows == padded else first * rows // padded

        def whole(piece: Tensor) -> Tensor:
            return head.whole(piece)[:kept]

        def piece(grad: Tensor) -> Tensor:
            inner = [0, 0] * (grad.dim() - 2)
            padding = [0, columns - head.out_features, *inner, 0, first - kept]
            filled = F.pad(grad, padding).reshape(-1, columns)
            block = take_block(take_block(filled, self.mesh, 1, self._words), self.mesh, 0, self._tokens)
            return block.reshape(value.shape)

        shape = (kept, *value.shape[1:-1], head.out_features)
        axes = (*self._tokens, *self._words)
        return ShardedOutput(what=name, mesh=self.mesh, axes=axes, shape=shape, whole=whole, piece=piece)

    def _refused(self, name: str, value: Tensor, axes: tuple[str, ...]) -> ShardedOutput:
        def refuse(piece: Tensor) -> NoReturn:
            raise LayoutError(
                f"{name}, of which this rank has {tuple(piece.shape)}, is split over {', '.join(axes)} and cannot be read: only "
                "logits, [..., words], are gathered from a model that computes its loss. Return the logits, and compute from them "
                "outside of the model"
            )

        shape = tuple(value.shape)
        return ShardedOutput(what=name, mesh=self.mesh, axes=(), shape=shape, whole=refuse, piece=refuse)
