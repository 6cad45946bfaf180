"""Sizes that can be split, and the message for those that cannot."""

from __future__ import annotations

import math

from meshfold.mesh import LayoutError, Mesh
from meshfold.tensor_parallel.modes import Mode


def split_evenly(size: int, axes: tuple[str, ...], mesh: Mesh, what: str) -> None:
    """Raise a LayoutError unless the blocks of the axes divide the size."""
    blocks = mesh.size(*axes)
    if size % blocks:
        raise LayoutError(
            f"{what} cannot be split over {', '.join(axes)} ({blocks} blocks): use a multiple of {blocks}, such as "
            f"{neighbours(size, blocks)}"
        )


def neighbours(size: int, multiple: int) -> str:
    """The multiples next to a size: ``'8 or 12'``."""
    below = size // multiple * multiple
    return f"{below} or {below + multiple}" if below else str(multiple)


def vocabulary_multiple(mode: Mode, mesh: Mesh) -> int:
    """What a vocabulary is padded to a multiple of, so that table, head and logits can all be split."""
    splits = [mode.layout("embedding")["v"], mode.layout("head")["v"], mode.layout("logits")["v"]]
    return math.lcm(*(mesh.size(*axes) for axes in splits))
