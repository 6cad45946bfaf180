"""The axes that a block is split over: a mode on a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.nn import functional

from meshfold.folding.axial.modes import AXIAL_MODES, AxialMode, Keys
from meshfold.folding.axial.redistribute import Redistribution
from meshfold.folding.memory import KEEP_ALL, MemorySettings
from meshfold.mesh import Layout, Mesh
from meshfold.mesh.collectives import bind_collect, bind_take


@dataclass(frozen=True, eq=False)
class Axes:
    """A mode on a mesh, seen by one block.

    Pair tensors are ``b i j c`` with i over ``rows`` and j over ``columns``, MSAs ``b s r c`` likewise. Sizes are padded to a
    multiple of :attr:`multiple`, so that every dim can be split over any of the axes. On one rank nothing is split or sent.

    Attributes:
        mesh: the ranks.
        mode: the row of the table.
        rows: axes that split i, and the sequences of an MSA.
        columns: axes that split j, and the residues of an MSA.
        product_steps: pieces that a triangle multiplication sends its operand in; more take less memory.
        memory: chunks and recomputation.
    """

    mesh: Mesh
    mode: AxialMode
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    product_steps: int = 1
    memory: MemorySettings = KEEP_ALL

    @staticmethod
    def of(mesh: Mesh, mode: AxialMode, product_steps: int = 1, memory: MemorySettings = KEEP_ALL) -> Axes:
        """Return a mode on a mesh."""
        made = Axes(mesh, mode, mode.rows, mode.columns, product_steps, memory)
        _ = made.turned.turned  # kept now: torch.compile cannot enter the lock of a cached property
        return made

    def __deepcopy__(self, _: object) -> Axes:
        return self  # a copy of a model lies on the same mesh

    def __post_init__(self) -> None:
        """Query the mesh once for what every forward needs: torch.compile breaks its graph where the mesh is queried."""
        for names in (self.rows, self.columns, self.all):
            self.mesh.size(*names)

    @cached_property
    def turned(self) -> Axes:
        """The axes of the transposed tensors ``b j i c`` and ``b r s c``. A transpose moves no data."""
        return Axes(self.mesh, self.mode, self.columns, self.rows, self.product_steps, self.memory)

    @property
    def all(self) -> tuple[str, ...]:
        """Every axis, those of the rows first: what a single representation is split over."""
        return self.rows + self.columns

    @property
    def keys(self) -> Keys:
        """Way in which attention gets the keys of a row; see :class:`AxialMode`."""
        return self.mode.attention

    @property
    def multiple(self) -> int:
        """The number that padded sizes are a multiple of: the ranks."""
        return self.mesh.size(*self.all)

    @property
    def is_split(self) -> bool:
        """True if there is more than one rank."""
        return self.multiple > 1

    def padded(self, size: int) -> int:
        """Return the size with its padding."""
        return -(-size // self.multiple) * self.multiple

    def index(self, axes: tuple[str, ...]) -> int:
        """Return the number of this rank's block along a dim that these axes split; 0 for a whole dim."""
        return self.mesh.index(*axes) if self.mesh.size(*axes) > 1 else 0

    def take(self, whole: Tensor, dim: int, axes: tuple[str, ...]) -> Tensor:
        """Return this rank's block of a tensor that is the same everywhere, zero in padding; for masks, not differentiable.

        ``whole`` is not padded.
        """
        size, blocks = whole.shape[dim], self.mesh.size(*axes)
        length = self.padded(size) // blocks
        start = min(self.index(axes) * length, size)
        block = whole.narrow(dim, start, min(length, size - start))
        return _padded(block, dim, length - block.shape[dim])

    def split(self, x: Tensor, *dims: tuple[int, tuple[str, ...]]) -> Tensor:
        """Pad a tensor that is the same on every rank and return this rank's block. Backward all-gathers the gradient.

        Args:
            x: the whole tensor.
            dims: for each dim that is split, its number and its axes.
        """
        for dim, axes in dims:
            x = _padded(x, dim, self.padded(x.shape[dim]) - x.shape[dim])
            x = bind_take(self.mesh, dim % x.dim(), axes)(x)
        return x

    def join(self, x: Tensor, *dims: tuple[int, tuple[str, ...], int]) -> Tensor:
        """Return the whole tensor, without padding, on every rank. Backward keeps this rank's block of the gradient.

        Right if every rank uses the result alike, as in a loss that all compute.

        Args:
            x: this rank's block.
            dims: for each dim that is split, its number, its axes and its size without padding.
        """
        for dim, axes, size in dims:
            x = bind_collect(self.mesh, dim % x.dim(), axes)(x).narrow(dim, 0, size)
        return x

    def move(self, source: str, target: str, dims: dict[str, int]) -> Redistribution:
        """Bind a redistribution; ``rows`` and ``columns`` in the layouts stand for the axes. On one rank it does nothing."""
        if not self.is_split:
            return _STAYS
        key = ("folding move", source, target, self.rows, self.columns, tuple(dims.items()))
        return self.mesh.once(key, lambda: self._bind(source, target, dims))

    def _bind(self, source: str, target: str, dims: dict[str, int]) -> Redistribution:
        return Redistribution(self._layout(source), self._layout(target), self.mesh, dims)

    def _layout(self, text: str) -> Layout:
        found: dict[str, tuple[str, ...]] = {}
        for word in text.split():
            dim, _, names = word.partition(":")
            axes: tuple[str, ...] = ()
            for name in filter(None, names.split(",")):
                axes += {"rows": self.rows, "columns": self.columns}[name]
            found[dim] = axes
        return Layout(found)


def _padded(x: Tensor, dim: int, by: int) -> Tensor:
    """Append ``by`` zeros along a dim."""
    if by == 0:
        return x
    after = x.dim() - 1 - dim % x.dim()
    return functional.pad(x, [0, 0] * after + [0, by])


_ONE = Mesh({}, rank=0)
_STAYS = Redistribution(Layout({}), Layout({}), _ONE, {})

WHOLE = Axes.of(_ONE, AXIAL_MODES["dap"])
"""One rank: the axes of blocks before :func:`meshfold.folding.parallelize_folding`."""
