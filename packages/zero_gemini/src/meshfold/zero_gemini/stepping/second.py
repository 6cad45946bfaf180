"""A second copy of a chunk's state in the host's memory, for a step that may not count.

Where the norm of the gradient is expected to be within its bound, a chunk need not wait for it: it is stepped beside the
backward from the one copy into the other. If the gradient then counts as expected the copies change places; if not, nothing
has happened (source: design, "Out of place in backward").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshfold.zero_gemini.arena import Block
from meshfold.zero_gemini.memory import Memory
from meshfold.zero_gemini.stepping.planes import Plane

PURPOSE = "optimizer state, second copy"


@dataclass(kw_only=True)
class SecondCopy:
    """Memory of the same kind and size as a chunk's weights and planes.

    Attributes:
        weights: of the shard.
        planes: what is kept beside them, by name.
    """

    weights: Block
    planes: dict[str, Block]

    @classmethod
    def like(cls, memory: Memory, weights: Tensor, planes: tuple[Plane, ...]) -> SecondCopy:
        """Room for one.

        Raises:
            OutOfBudget: if the host has not as much memory left; none is taken then.
        """
        taken: dict[str, Block] = {}

        def take(name: str, elements: int, dtype: torch.dtype) -> None:
            taken[name] = memory.allocate(elements, dtype, "host", PURPOSE)

        elements = weights.numel()
        try:
            take("", elements, weights.dtype)
            for plane in planes:
                take(plane.name, plane.numel(elements), plane.dtype)
        except BaseException:
            for block in taken.values():
                block.free()
            raise
        return cls(weights=taken.pop(""), planes=taken)

    def free(self) -> None:
        """Give the memory back."""
        for block in (self.weights, *self.planes.values()):
            block.free()
