"""The chunks of a torch optimizer whose state is on disk: what is stored for each, where, and how it is read and written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshfold.mesh.parameters import OptimizerProbeError, StateLayout, state_layout
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.optimizer.disk_buffers import Piece
from meshfold.zero_gemini.optimizer.disk_state import DiskPlanes, DiskSettings
from meshfold.zero_gemini.optimizer.master_weights import Plane, Weights, cut

MASTER = "master weights"
"""Name of the plane of master weights, of a model that computes in another dtype."""


@dataclass(eq=False, kw_only=True)
class ChunkOnDisk:
    """The state of one chunk on disk.

    Attributes:
        chunk: of the state.
        weights: those that the model computes with.
        planes: tensors on disk.
        pieces: where they are.
        present: keys of the state that each parameter has.
    """

    chunk: Chunk
    weights: Weights
    planes: tuple[Plane, ...]
    pieces: list[Piece]
    present: dict[str, set[str]] = field(default_factory=dict)

    @property
    def is_wide(self) -> bool:
        """Return True if master weights are on disk."""
        return any(plane.name == MASTER for plane in self.planes)


class ChunksOnDisk:
    """The files of an optimizer's state, and what is in them.

    Attributes:
        disk: files and buffers.
        held: by chunk.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: DiskSettings, dtype: torch.dtype | None, *, with_state: bool
    ) -> None:
        """Args:
        optimizer: of torch, elementwise or with ``sight="norms"``.
        settings: of the disk.
        dtype: of the master weights; None: as the model computes.
        with_state: the optimizer makes its state at construction.
        """
        self._optimizer, self._dtype, self._with_state = optimizer, dtype, with_state
        self.disk = DiskPlanes(settings)
        self.held: dict[Chunk, ChunkOnDisk] = {}
        self._planes: dict[torch.dtype, tuple[Plane, ...]] = {}
        self._layouts: dict[torch.dtype, StateLayout] = {}

    def planes_of(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        """Return the planes of a chunk that the model computes with in this dtype; none if there is nothing to store.

        Raises:
            MemoryPlanError: for an optimizer that cannot step in pieces.
        """
        if dtype not in self._planes:
            master, name = self._dtype or dtype, type(self._optimizer).__name__
            instead = "use adamw, or keep it on the host (leave offload_path out)"
            try:
                layout = self._layout(master)
            except OptimizerProbeError as error:
                raise MemoryPlanError(f"the state of {name} cannot be on disk: {error}; {instead}") from error
            if layout.others:
                raise MemoryPlanError(
                    f"the state of {name} cannot be on disk: it keeps {', '.join(layout.others)}, neither a number nor a tensor of "
                    f"a parameter's shape; {instead}"
                )
            if layout.changed:
                raise MemoryPlanError(
                    f"the state of {name} cannot be on disk: its step changes its own {', '.join(layout.changed)}, and on disk "
                    f"it is called once for each piece of the state; let it keep that in self.state or in its groups, or {instead}"
                )
            wide = (Plane(MASTER, master),) if master != dtype else ()
            self._planes[dtype] = wide + tuple(Plane(key, kind) for key, kind in layout.like.items())
        return self._planes[dtype]

    def _layout(self, master: torch.dtype) -> StateLayout:
        if master not in self._layouts:
            self._layouts[master] = state_layout(self._optimizer, master, with_state=self._with_state)
        return self._layouts[master]

    def steps_one_by_one(self, dtypes: Iterable[torch.dtype]) -> bool:
        """Return True if chunks can be stepped at different times; ``dtypes``: that the model computes with."""
        try:
            return all(self._layout(self._dtype or dtype).steps_one_by_one for dtype in dtypes)
        except OptimizerProbeError:
            return False

    def check_keys(self, dtype: torch.dtype, keys: set[str]) -> None:
        """Check that there is room for tensors of the state; ``dtype``: as of :meth:`planes_of`.

        Raises:
            MemoryPlanError: if the optimizer keeps more than when it was tried out.
        """
        unknown = sorted(keys - {plane.name for plane in self.planes_of(dtype)})
        if unknown:
            raise MemoryPlanError(
                f"{type(self._optimizer).__name__} now keeps {', '.join(unknown)}, for which nothing is reserved on disk: give it "
                "the settings that need it from the start, or keep its state on the host (leave offload_path out)"
            )

    def reserve(self, shards: Iterable[tuple[torch.dtype, int]]) -> None:
        """Reserve room for the state of chunks; see :meth:`DiskPlanes.reserve`."""
        self.disk.reserve((planes, elements) for dtype, elements in shards if (planes := self.planes_of(dtype)))

    def take(self, chunk: Chunk, weights: Weights) -> ChunkOnDisk:
        """Return room for a chunk's state. It is not held yet."""
        planes = self.planes_of(chunk.dtype)
        pieces = self.disk.take(str(chunk), planes, chunk.shard.numel(), chunk.memory)
        return ChunkOnDisk(chunk=chunk, weights=weights, planes=planes, pieces=pieces)

    def give_back(self, held: ChunkOnDisk) -> None:
        """Forget a chunk's state on disk."""
        self.held.pop(held.chunk, None)
        self.disk.give_back(held.pieces, held.chunk.memory)
        held.pieces = []

    def views(
        self, held: ChunkOnDisk, begin: int, end: int, *, change: bool, now: bool = False
    ) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Yield the state of elements ``begin`` to ``end`` of a shard piece by piece: first and one past the last, and views.

        Raises:
            DiskError: if it cannot be read.
        """
        for piece in held.pieces:
            a, z = max(begin, piece.begin), min(end, piece.end)
            if a < z:
                with self.disk.ring.open(piece, change=change, now=now) as views:
                    yield a, z, cut(held.planes, views, a - piece.begin, z - piece.begin)

    def read(self, held: ChunkOnDisk, name: str, key: str) -> Tensor:
        """Return a copy of this rank's elements of one of a parameter's tensors."""
        spans = self.views(held, *held.chunk.span(name), change=False)
        return torch.cat([views[key].clone() for _, _, views in spans])

    def write(self, held: ChunkOnDisk, name: str, key: str, value: Tensor) -> None:
        """Set this rank's elements of one of a parameter's tensors."""
        begin, end = held.chunk.span(name)
        for a, z, views in self.views(held, begin, end, change=True):
            views[key].copy_(value.reshape(-1)[a - begin : z - begin])
        if key != MASTER:
            held.present.setdefault(name, set()).add(key)

    def close(self) -> None:
        """Remove the files, and release the buffers."""
        self.held.clear()
        self.disk.close()
