"""Plan of a rank's file, worked out once: its rectangles in order, and the file's header.

It takes tens of microseconds of Python a rectangle, which the training would have to do without. So the next save takes it
over if its tensors are cut alike. It holds no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from meshfold.checkpoint.shards import Shard, ShardRule
from meshfold.checkpoint.staging import with_pauses
from meshfold.checkpoint.tensors import SafetensorsHeader, TensorInfo, shard_key
from meshfold.engine.states.replicated import Source

Tensors = list[tuple[str, torch.dtype, tuple[int, ...], bool, ShardRule]]
"""All that a plan hangs on: each tensor's name, dtype and whole shape, whether it is on a disk, and its cut."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A rectangle on its way to a file.

    Attributes:
        tensor: of which it is a piece.
        key: its name in the file.
        described: what it is.
        piece: which one.
        on_disk: whether its tensor is on a disk.
    """

    tensor: str
    key: str
    described: TensorInfo
    piece: Shard
    on_disk: bool


class FilePlan:
    """Plan of one file of this rank; :func:`plan_of` makes it.

    Attributes:
        rectangles: in the order of the file.
        header: of the file.
        bytes: of all rectangles.
        described: every tensor, whole.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        # What is on a disk is written first. Wide dtypes first, so that each begins at a multiple of its elements.
        self.rectangles = sorted(
            (
                Written(
                    tensor=tensor,
                    key=shard_key(tensor, piece.offsets, piece.sizes),
                    described=TensorInfo(dtype=dtype, shape=piece.sizes),
                    piece=piece,
                    on_disk=on_disk,
                )
                for tensor, dtype, _, on_disk, cut in with_pauses(tensors)
                for piece in cut.shards(tensor)
            ),
            key=lambda one: (not one.on_disk, -one.described.dtype.itemsize),
        )
        announced = {one.key: one.described for one in with_pauses(self.rectangles)}
        self.header = SafetensorsHeader(announced, order=[*announced])
        self.bytes = sum(described.bytes for described in announced.values())
        self.described = {
            tensor: TensorInfo(dtype=dtype, shape=shape) for tensor, dtype, shape, *_ in with_pauses(tensors)
        }


def plan_of(sources: Iterable[tuple[str, Source]], before: FilePlan | None) -> FilePlan:
    """The plan of a file of these tensors: the one before where it is the same.

    Args:
        sources: the tensors with their names. None is kept.
        before: of the last save of such a file.
    """
    tensors = [
        (name, source.dtype, source.shape, source.on_disk, source.cut())
        for name, source in with_pauses(sources)
    ]
    return before if before is not None and before.tensors == tensors else FilePlan(tensors)
