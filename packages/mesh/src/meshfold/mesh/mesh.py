"""The mesh: named axes with sizes, and the groups of ranks along them.

A mesh is a pure object. Questions about ranks need no process group, so plans and tests for hundreds of ranks run in one process.
Only :meth:`Mesh.group` needs the processes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

from meshfold.mesh.errors import MeshfoldError, SpecError, did_you_mean
from meshfold.mesh.group import Group
from meshfold.mesh.processes.sub_world import current_ranks

T = TypeVar("T")

_FACTOR = re.compile(r"(?P<axis>[A-Za-z][A-Za-z0-9_]*)(%(?P<minor>[1-9][0-9]*))?(/(?P<major>[1-9][0-9]*))?")


class Mesh:
    """Named axes with sizes; ranks are row-major over them, so the last axis varies fastest.

    Several meshes may live in one process. A token for an axis is its name, or a factor of it:
    ``"tensor/2"`` is its major factor of size 2 (``i // (n/2)``), ``"tensor%2"`` its minor one (``i % 2``), and ``"tensor%4/2"``
    the major factor of size 2 of its minor one of size 4 (``i % 4 // 2``).
    An axis that the mesh does not have counts as size 1, so code need not check which axes exist.

    >>> mesh = Mesh({"data": 2, "row": 2, "col": 2})
    >>> mesh.groups("row")
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    >>> mesh.size("row", "col"), mesh.size("depth")
    (4, 1)

    Attributes:
        axes: name to size, outermost first.
        first_rank: the global rank of the mesh's rank 0.
    """

    def __init__(self, axes: Mapping[str, int], rank: int | None = None) -> None:
        """Make a mesh of all ranks of the job, or of those of :func:`meshfold.mesh.processes.only_ranks`.

        Args:
            axes: name to size, outermost first.
            rank: which rank to be; by default this process's rank, 0 without a process group.

        Raises:
            SpecError: for a size that is not a positive int, or a rank outside the mesh.
        """
        if not isinstance(axes, Mapping):
            raise SpecError(f"a mesh is made of a mapping from axis name to size, such as dict(data=2), not {axes!r}")
        for name, size in axes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise SpecError(f"axis {name!r} of the mesh has size {size!r}: a size is a whole number from 1 up")
        self.axes: dict[str, int] = dict(axes)
        self._given_rank = rank
        self._members = None if rank is not None else current_ranks()
        self.first_rank = 0 if self._members is None else self._members.start
        # Caches: layers ask in every forward, and torch.compile can trace a dict lookup.
        self._sizes: dict[tuple[str, ...], int] = {}
        self._indices: dict[tuple[str, ...], int] = {}
        self._numbers: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._groups: dict[tuple[str, ...], Group] = {}
        self._handles: dict[tuple[int, ...], Any] = {}
        self._made: dict[Hashable, Any] = {}
        self._closed = False
        if rank is not None and not 0 <= rank < self.world_size:
            raise SpecError(
                f"rank {rank} is outside a mesh of {self.world_size} ranks ({self}): use 0 to {self.world_size - 1}"
            )

    def __repr__(self) -> str:
        return f"Mesh({' × '.join(f'{name} {size}' for name, size in self.axes.items()) or 'one rank'})"

    @property
    def is_part(self) -> bool:
        """True if it spans only some ranks of the job."""
        return self._members is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, outermost first."""
        return tuple(self.axes)

    @cached_property
    def world_size(self) -> int:
        """The number of ranks: the product of the axes."""
        return math.prod(self.axes.values())

    @cached_property
    def rank(self) -> int:
        """This process's rank in the mesh."""
        if self._given_rank is not None:
            return self._given_rank
        from meshfold.mesh.processes import groups

        world = groups.world_of(self._members)
        if world is None:
            return 0
        if world.size != self.world_size:
            raise SpecError(
                f"{self} has {self.world_size} ranks but {world.size} processes are running: "
                f"make the product of the axes {world.size}, or start {self.world_size} processes"
            )
        return world.rank

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Return axis name to coordinate of a rank (by default this process)."""
        rest = self.rank if rank is None else rank
        found: dict[str, int] = {}
        for name in reversed(self.axes):
            rest, found[name] = divmod(rest, self.axes[name])
        return {name: found[name] for name in self.axes}

    def size(self, *axes: str) -> int:
        """Return the product of the sizes of the axes (1 for an axis that the mesh does not have)."""
        known = self._sizes.get(axes)
        if known is None:
            known = self._sizes[axes] = math.prod(self._factor(axis)[1] for axis in axes)
        return known

    def index(self, *axes: str, rank: int | None = None) -> int:
        """Return the row-major index of a rank (by default this process) over the axes as given: its block's number."""
        if rank is not None:
            return self._index(self.coordinates(rank), axes)
        known = self._indices.get(axes)
        if known is None:
            known = self._indices[axes] = self._index(self.coordinates(), axes)
        return known

    def groups(self, *axes: str) -> list[list[int]]:
        """Return every group along the axes: ranks that share all other coordinates.

        Each is listed in row-major order over the axes *as given*; groups come in the order of their lowest rank.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            found.setdefault(self._elsewhere(at, axes), []).append(rank)
        for ranks in found.values():
            ranks.sort(key=lambda rank: self._index(self.coordinates(rank), axes))
        return sorted(found.values(), key=min)

    def digits(self, *axes: str) -> list[tuple[int, int, bool]]:
        """Return the digits of a rank's number, lowest first: size, stride, and whether ranks of a group along the axes differ.

        An axis is one digit, or several if the axes given are factors of it.

        Raises:
            SpecError: for factors that overlap, of which none divides the other.
        """
        found: list[tuple[int, int, bool]] = []
        stride = 1
        for name, whole in reversed(self.axes.items()):
            factors = [(size, divisor) for base, size, divisor in map(self._factor, axes) if base == name]
            cuts = sorted(
                {1, whole, *(divisor for _, divisor in factors), *(size * divisor for size, divisor in factors)}
            )
            for low, high in pairwise(cuts):
                if high % low:
                    raise SpecError(
                        f"{self}: factors of axis {name!r} among {axes} overlap: {low} does not divide {high}"
                    )
                along = any(divisor <= low and high <= size * divisor for size, divisor in factors)
                found.append((high // low, stride * low, along))
            stride *= whole
        return found

    def ranks_along(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks of this rank's group along the axes, ascending, without listing those of others."""
        coordinates = self.coordinates()
        ranks = self._candidates(coordinates, axes)
        if all(axis in self.axes for axis in axes):
            return tuple(ranks)
        here = self._elsewhere(coordinates, axes)
        return tuple(rank for rank in ranks if self._elsewhere(self.coordinates(rank), axes) == here)

    def spanned(self, *axes: str) -> tuple[str, ...]:
        """Return the axes in mesh order, without axes of size 1: the name of a group in records and plans."""
        return tuple(
            sorted((a for a in axes if self.size(a) > 1), key=lambda a: (self._position(a), -self._factor(a)[2]))
        )

    def group(self, *axes: str) -> Group:
        """Return this process's group along the axes, with its process group (made at the first call, then kept).

        All ranks must ask for their groups in the same order, as with every call that makes a process group.
        """
        known = self._groups.get(axes)
        if known is None:
            known = self._groups[axes] = self._make_group(axes)
        return known

    def channel(self, purpose: str, *axes: str) -> Group:
        """Return the group along the axes with a separate process group, whose messages do not wait for others.

        All of its ranks must call.
        """
        from meshfold.mesh.processes import groups

        group = self.group(*axes)
        if group.size == 1:
            return group
        handle = self.once(("channel", purpose, group.ranks), lambda: groups.create_group(group.ranks, purpose))
        return replace(group, name=groups.group_name(handle))

    def numbers(self, *axes: str) -> tuple[int, ...]:
        """Return the index over the axes, in the order given, of each rank of this process's group, which has mesh order."""
        known = self._numbers.get(axes)
        if known is None:
            ranks = self.group(*axes).ranks
            places = [[*self.axes].index(axis) for axis in axes if axis in self.axes]
            in_mesh_order = len(places) == len(axes) and places == sorted({*places})
            order = (
                range(len(ranks))
                if len(axes) <= 1 or in_mesh_order
                else (self.index(*axes, rank=rank - self.first_rank) for rank in ranks)
            )
            known = self._numbers[axes] = tuple(order)
        return known

    def prepare(self, *axes: str) -> None:
        """Make the group along the axes now, before a forward is traced, if processes are running."""
        from meshfold.mesh.processes import groups

        self.size(*axes)
        if groups.running_world() is not None and not self._closed:
            self.index(*axes)
            self.numbers(*axes)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the first result of ``make`` for this key. Identical layers share what they bind to the
        mesh through it, so that torch.compile, which guards on identity, compiles them once."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    def close(self) -> None:
        """Stop communicating. The mesh still answers questions about ranks, and has groups of one. Its process groups stay with
        the world, for the next mesh with the same ranks."""
        self._handles.clear()
        self._groups.clear()
        self._closed = True

    @property
    def is_closed(self) -> bool:
        """True after :meth:`close`."""
        return self._closed

    def require(self, *axes: str, what: str) -> None:
        """Raise a LayoutError if the mesh lacks one of the axes, where a missing axis must be a mistake."""
        from meshfold.mesh.errors import LayoutError

        for axis in axes:
            base = axis.split("/")[0].split("%")[0]
            if base not in self.axes:
                raise LayoutError(
                    f"{what} names the axis {axis!r}, which {self} does not have.{did_you_mean(base, self.axes)} "
                    f"Its axes are {', '.join(self.axes) or 'none'}"
                )

    def _make_group(self, axes: tuple[str, ...]) -> Group:
        spanned = self.spanned(*axes)
        ranks = self.ranks_along(*spanned)
        index = ranks.index(self.rank) if len(ranks) > 1 else 0
        ranks = tuple(self.first_rank + r for r in ranks)
        if len(ranks) == 1:
            return Group(axes=(), ranks=ranks, index=0, name="")
        if self._closed:
            raise MeshfoldError(f"{self} is closed: make a new Mesh")
        return Group(axes=spanned, ranks=ranks, index=index, name=self._handle(ranks))

    def _handle(self, ranks: tuple[int, ...]) -> str:
        """Return the name of the process group of these global ranks, made at the first call."""
        from meshfold.mesh.processes import groups

        if ranks not in self._handles:
            self._handles[ranks] = groups.create_group(ranks)
        return groups.group_name(self._handles[ranks])

    def _candidates(self, at: Mapping[str, int], axes: tuple[str, ...]) -> list[int]:
        """Return the ranks that agree with ``at`` on every axis not in ``axes``, ascending."""
        touched = {axis.split("/")[0].split("%")[0] for axis in axes}
        ranks = [0]
        for name, size in self.axes.items():
            places = range(size) if name in touched else (at[name],)
            ranks = [rank * size + place for rank in ranks for place in places]
        return ranks

    def _position(self, axis: str) -> int:
        return list(self.axes).index(axis.split("/")[0].split("%")[0])

    def _factor(self, axis: str) -> tuple[str, int, int]:
        """Return (base axis, size, divisor): coordinate along the token = (coordinate // divisor) % size."""
        factor = _FACTOR.fullmatch(axis)
        if factor is None or (factor["minor"] is None and factor["major"] is None):
            return axis, self.axes.get(axis, 1), 1
        base = factor["axis"]
        whole = self.axes.get(base, 1)
        minor = whole if factor["minor"] is None else int(factor["minor"])
        size = minor if factor["major"] is None else int(factor["major"])
        if whole % minor:
            raise SpecError(f"{axis!r}: axis {base!r} has size {whole}, which {minor} does not divide")
        if minor % size:
            of = f"axis {base!r}" if minor == whole else f"its factor {base}%{minor}"
            raise SpecError(f"{axis!r}: {of} has size {minor}, which {size} does not divide")
        return base, size, minor // size

    def _index(self, at: Mapping[str, int], axes: tuple[str, ...]) -> int:
        index = 0
        for axis in axes:
            base, size, divisor = self._factor(axis)
            index = index * size + (at.get(base, 0) // divisor) % size
        return index

    def _elsewhere(self, at: Mapping[str, int], axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the coordinates outside ``axes``, which identify a group along ``axes``."""
        rest = dict(at)
        for axis in axes:
            base, size, divisor = self._factor(axis)
            if base in rest:
                rest[base] -= (at[base] // divisor) % size * divisor
        return tuple(rest.values())


class MetaMesh(Mesh):
    """A mesh for meta tensors only: its collectives give shapes and send nothing, and need no process group.

    Programs are counted on it for any number of ranks, also while other ranks are running. Its collectives are
    recorded by ``record(on_meta=True)`` only.
    """

    def __init__(self, axes: Mapping[str, int]) -> None:
        """``axes``: name to size, outermost first. This process is rank 0."""
        super().__init__(axes, rank=0)

    def prepare(self, *axes: str) -> None:
        """Do nothing: there are no groups to make."""

    def _handle(self, ranks: tuple[int, ...]) -> str:
        return ""
