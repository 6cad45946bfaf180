"""Memory that generation takes on a rank, told before requests run."""

from __future__ import annotations

from dataclasses import dataclass

from meshfold.mesh.spec import format_bytes


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on a rank's device. The CUDA context, and what torch's allocator rounds up, are not among them.

    Attributes:
        weights: parameters and buffers of the model that are there, packed ones as they are stored.
        pages: keys and values.
        buffers: of the batches that have run, such as tables of pages.
        work: activations, logits and random numbers of the largest forward; top-k, top-p and penalties take more. 0 where there are
            no pages: it is not known.
    """

    weights: int
    pages: int
    buffers: int
    work: int

    @property
    def total(self) -> int:
        """All of them, in bytes."""
        return self.weights + self.pages + self.buffers + self.work

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in vars(self).items() if size)
        return f"{format_bytes(self.total)} a rank: {listed}"
