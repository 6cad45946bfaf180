"""The modes: over which axes the ring and the all-to-all run, and how the sequence is sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshfold.mesh import LayoutError, Mesh, did_you_mean
from meshfold.sequence.sharding import SequenceSharding, check_order


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A row of the table.

    Attributes:
        ring: the axes that keys and values travel on.
        ulysses: the axes over which heads are split during attention.
        order: how the sequence is sharded unless another order is asked for.
    """

    ring: tuple[str, ...] = ()
    ulysses: tuple[str, ...] = ()
    order: str = "zigzag"

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that the sequence is split over, major first."""
        return self.ring + self.ulysses


MODES: Mapping[str, Mode] = {
    "ring": Mode(ring=("seq",)),
    "ulysses": Mode(ulysses=("seq",)),
    "ring_ulysses": Mode(ring=("ring",), ulysses=("ulysses",)),
    "ring_self": Mode(ring=("seq",), order="contiguous"),
}
_OWN = Mode(ring=("seq",), order="contiguous")  # an attention of one's own: it says what runs over the axis


def sequence_mode(mode: str | Callable[..., object], mesh: Mesh) -> Mode:
    """Return the row of a mode, checked against the mesh.

    Raises:
        LayoutError: for an unknown mode, or a mesh whose sequence axes are those of another mode.
    """
    if callable(mode):
        return _OWN
    if mode == "megatron":
        raise LayoutError(
            "mode='megatron' splits the sequence between the layers of tensor parallelism and leaves attention whole: it "
            "belongs to meshfold.tensor_parallel, tensor=dict(mode='1d', ...) with sequence=dict(mode='megatron')"
        )
    if mode not in MODES:
        raise LayoutError(
            f"mode={mode!r}: sequence parallelism knows {', '.join(map(repr, MODES))}.{did_you_mean(str(mode), MODES)}"
        )
    found = MODES[mode]
    others = [axis for axis in ("seq", "ring", "ulysses") if axis not in found.axes and mesh.size(axis) > 1]
    if others:
        fitting = "ring_ulysses" if "seq" not in others else "ring"
        raise LayoutError(
            f"mode={mode!r} splits the sequence over the axis {' × '.join(found.axes)}, but {mesh} splits it over "
            f"{' × '.join(others)}: write mode={fitting!r}, or make the mesh from sequence=dict(mode={mode!r}, ...)"
        )
    return found


def sequence_sharding(
    length: int, mesh: Mesh, mode: str | Callable[..., object], order: str | None = None
) -> SequenceSharding:
    """Return the sharding of a sequence of ``length`` tokens under a mode.

    Raises:
        LayoutError: for an unknown mode or order, or a mesh that does not fit the mode.
    """
    found = sequence_mode(mode, mesh)
    return SequenceSharding(
        length=length,
        ring=mesh.size(*found.ring),
        ulysses=mesh.size(*found.ulysses),
        order=found.order if order is None else check_order(order),
    )
