"""A second copy of a chunk's state in the host's memory, for a step that may not count.

Where the norm of the gradient is expected to be within its bound, a chunk need not wait for it: it is stepped beside the
backward from the one copy into the other. If the gradient then counts as expected the copies change places; if not, nothing
has happened (source: design, "Out of place in backward").
"""

from __future__ import annotations

from dataclasses import dataclass

from meshfold.zero_gemini.memory.arena import Block


@dataclass(kw_only=True)
class SecondCopy:
    """Memory of the same kind and size as a chunk's weights and planes.

    Attributes:
        weights: of the shard.
        planes: what is kept beside them, by name.
    """

    weights: Block
    planes: dict[str, Block]

    def free(self) -> None:
        """Give the memory back."""
        for block in (self.weights, *self.planes.values()):
            block.free()
