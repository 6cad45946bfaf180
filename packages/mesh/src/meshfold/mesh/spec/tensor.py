"""The entry ``tensor``: 1d, 2d, 2.5d, 3d or a custom mode, the sizes of its axes, and how attention is computed.

All modes are treated the same way: each has named axes. ``depth`` sets the axis of that name. The others have equal sizes if
only ``size`` is given (a square, a cube), or those that ``grid`` names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

from meshfold.mesh.spec.entry import (
    Entry,
    balanced,
    divisors,
    format_value,
    is_power,
    join_choices,
    kind,
    meant,
    powers_near,
    root,
)

# Axes of the built-in modes, outermost first.
MODES: dict[str, tuple[str, ...]] = {
    "1d": ("tensor",),
    "2d": ("row", "col"),
    "2.5d": ("depth", "row", "col"),
    "3d": ("a", "b", "c"),
}
OVERLAPS = ("auto", "gather", "stream", "ring", "push")
ATTENTIONS = ("tokens", "heads")
KEYS = ("mode", "size", "depth", "grid", "overlap", "attention")
RESERVED = ("data", "pipe", "seq", "ring", "ulysses")  # axes of other entries

_POWERS = {2: "a square", 3: "a cube"}


class TensorMode(Protocol):
    """A custom mode, as far as a spec needs to know it: a name, and mesh axes outermost first."""

    @property
    def name(self) -> str: ...

    @property
    def axes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """The checked entry ``tensor``: ``sizes`` has the size of each of ``axis_names``, outermost first.

    ``overlap`` is how gathers and matmuls are interleaved: ``"gather"``, ``"stream"``, ``"ring"`` or, in mode ``"1d"``, ``"push"``;
    ``"auto"`` uses, for each matmul, the one of the first three that should be fastest. None is ``"gather"``.

    ``attention="tokens"``, in mode ``"1d"``: every rank has the whole weights of attention's linear layers and multiplies its own
    tokens. The stream between layers is split by tokens, as under ``sequence=dict(mode="megatron")``. ``"heads"``: they are split
    by heads, as the mode says. None: the same, unless ``meshfold plan``, ``meshfold train`` or :func:`meshfold.planner.choose_spec`
    chooses under ``overlap="auto"``. ``chosen`` is the reason of that choice, in words; the entry does not have it.
    """

    mode: str | TensorMode
    sizes: tuple[int, ...]
    overlap: str | None = None
    attention: str | None = None
    chosen: str = field(default="", compare=False)

    @property
    def by_tokens(self) -> bool:
        """True if attention's linear layers are computed by tokens."""
        return self.attention == "tokens"

    @property
    def mode_name(self) -> str:
        """``"2d"``, or the name of a custom mode."""
        return self.mode if isinstance(self.mode, str) else self.mode.name

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The mode's axes, outermost first."""
        return MODES[self.mode] if isinstance(self.mode, str) else tuple(self.mode.axes)

    @property
    def axes(self) -> dict[str, int]:
        """Axis name to size, outermost first."""
        return dict(zip(self.axis_names, self.sizes, strict=True))

    @property
    def size(self) -> int:
        """Ranks that one copy of the tensors is spread over."""
        return math.prod(self.sizes)

    @property
    def depth(self) -> int | None:
        """Size of the axis ``depth``; None for a mode that has no such axis."""
        return self.axes.get("depth")

    @property
    def grid(self) -> tuple[int, ...] | None:
        """Sizes of the axes other than ``depth``; None where there is only one."""
        sizes = tuple(size for name, size in self.axes.items() if name != "depth")
        return sizes if len(sizes) > 1 else None

    @classmethod
    def parse(cls, value: object) -> TensorSpec:
        """Check ``4`` (1d) or a dict with the keys mode, size, depth, grid, overlap, attention. Raises SpecError."""
        entry = Entry(name="tensor", value=value)
        if isinstance(value, int):
            return cls(mode="1d", sizes=(entry.count("tensor", value, 2),))
        fields = entry.fields(KEYS, "tensor=4 (1d) or tensor=dict(mode='2d', size=4)")
        mode, name, axes = _mode(entry, fields.get("mode", "1d"))
        return cls(
            mode=mode,
            sizes=_sizes(entry, name, axes, fields),
            overlap=_overlap(entry, mode, fields),
            attention=_attention(entry, mode, name, fields),
        )

    def to_dict(self) -> dict[str, object]:
        """Return the entry that parses to this."""
        return {key: getattr(self, key) for key in KEYS if getattr(self, key) is not None}


def _mode(entry: Entry, value: object) -> tuple[str | TensorMode, str, tuple[str, ...]]:
    """Return the mode, its name and its axes."""
    if isinstance(value, str):
        size = meant(entry.fields(KEYS, "").get("size")) or 2
        if value == "sequence":
            problem = "'sequence' is no mode of tensor; it is an entry of its own."
            raise entry.error(problem, f"Write sequence=dict(mode='ring', size={size}) instead.")
        if value == "1d+sequence":  # its name in parallelize
            problem = "mode '1d+sequence' is written as two entries in a spec."
            raise entry.error(problem, f"Write tensor={size}, sequence=dict(mode='megatron').")
        if value == "1d+tokens":  # its name in parallelize
            problem = "mode '1d+tokens' is written with a key of its own in a spec."
            raise entry.error(problem, f"Write tensor=dict(mode='1d', size={size}, attention='tokens').")
        name = entry.choice("mode", value, tuple(MODES), ", or a mode object with a name and axes")
        return name, name, MODES[name]
    own_name, own_axes = getattr(value, "name", None), getattr(value, "axes", None)
    if not isinstance(own_name, str) or not isinstance(own_axes, (tuple, list)):
        raise entry.error(
            f"mode={format_value(value)} is {kind(value)}, neither a mode's name nor an object with a name and axes.",
            f"Known: {', '.join(MODES)}; a mode of your own has a string .name and a tuple .axes.",
        )
    axes = tuple(own_axes)
    for axis in axes:
        if not isinstance(axis, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", axis):
            raise entry.error(
                f"the axis {format_value(axis)} of mode {own_name!r} is not a plain name.",
                "Name axes with letters, digits and underscores, e.g. axes=('x', 'y').",
            )
        if axis in RESERVED:
            raise entry.error(
                f"the axis {axis!r} of mode {own_name!r} belongs to another entry ({', '.join(RESERVED)}).",
                f"Give it another name, e.g. {axis + '_t'!r}.",
            )
    if not axes or len(set(axes)) != len(axes) or axes == ("depth",):
        raise entry.error(
            f"mode {own_name!r} has the axes {axes}.",
            "Give it one or more different axes, not 'depth' alone, e.g. axes=('x', 'y').",
        )
    return cast(TensorMode, value), own_name, axes


def _overlap(entry: Entry, mode: str | TensorMode, fields: Mapping[str, object]) -> str | None:
    value = fields.get("overlap")
    if value is None:
        return None
    overlap = entry.choice("overlap", value, OVERLAPS, ", or None")
    if overlap == "stream" and mode in ("1d", "3d"):
        raise entry.error(
            f"overlap='stream' needs panels of x and w along k, as 2d and 2.5d have; {mode!r} has none.",
            "Write overlap='ring' or overlap='gather', or leave it to overlap='auto'.",
        )
    if overlap == "push" and isinstance(mode, str) and mode != "1d":
        raise entry.error(
            f"overlap='push' pushes rows of a stream split by tokens over one axis, as mode '1d' can have; mode is {mode!r}.",
            "Write mode='1d' with sequence=dict(mode='megatron'), or leave it to overlap='auto'.",
        )
    return overlap


def _attention(entry: Entry, mode: str | TensorMode, name: str, fields: Mapping[str, object]) -> str | None:
    value = fields.get("attention")
    if value is None:
        return None
    attention = entry.choice("attention", value, ATTENTIONS, ", or None")
    if attention == "tokens" and mode != "1d":
        raise entry.error(
            f"attention={attention!r} needs a stream split by tokens alone, as mode '1d' can have; mode is {name!r}.",
            f"Write mode='1d', or leave attention={attention!r} out.",
        )
    return attention


def _sizes(entry: Entry, name: str, axes: tuple[str, ...], fields: Mapping[str, object]) -> tuple[int, ...]:
    """Return the size of every axis, from the given ones of size, depth and grid."""
    free = tuple(axis for axis in axes if axis != "depth")
    size = entry.count("size", fields["size"], 4) if "size" in fields else None
    depth = _depth(entry, name, axes, free, size, fields)
    if "grid" in fields:
        rest = _grid(entry, name, free, size, depth, fields)
    else:
        rest = _equal(entry, name, free, size, depth, fields)
    others = iter(rest)
    return tuple(depth if axis == "depth" else next(others) for axis in axes)


def _depth(
    entry: Entry,
    name: str,
    axes: tuple[str, ...],
    free: tuple[str, ...],
    size: int | None,
    fields: Mapping[str, object],
) -> int:
    has_depth = len(free) < len(axes)
    if "depth" not in fields:
        if not has_depth:
            return 1
        grid = fields.get("grid")
        change = "Write depth=2, say."
        if isinstance(grid, (tuple, list)) and len(grid) == len(axes):
            change = f"Write depth={format_value(grid[0])}, grid={format_value(grid[1:])}."
        elif grid is None and size is not None:
            change = f"Write depth={join_choices(_depths(size, len(free))[:4])}."
        raise entry.error(f"mode {name!r} needs depth: size = depth × {' × '.join(free)}.", change)
    depth = entry.count("depth", fields["depth"], 2)
    if not has_depth:
        raise entry.error(
            f"depth belongs to mode '2.5d'; mode {name!r} has the axes {', '.join(axes)}.",
            "Leave depth out, or write mode='2.5d'.",
        )
    return depth


def _grid(
    entry: Entry, name: str, free: tuple[str, ...], size: int | None, depth: int, fields: Mapping[str, object]
) -> tuple[int, ...]:
    value = fields["grid"]
    if len(free) == 1:
        change = f"Write size={4 if size is None else size}, or mode='2d' for rows and columns."
        raise entry.error(f"mode {name!r} takes no grid: its only free axis is {free[0]}.", change)
    example = balanced(4 if size is None or size % depth else size // depth, len(free))
    wanted = f"grid=({', '.join(free)}), e.g. grid={example}"
    if not isinstance(value, (tuple, list)):
        raise entry.error(f"grid={format_value(value)} is {kind(value)}, not a tuple of ints.", f"Write {wanted}.")
    if len(value) != len(free):
        entries = "1 entry" if len(value) == 1 else f"{len(value)} entries"
        beside = " beside depth" if "depth" in fields else ""
        problem = f"grid={format_value(value)} has {entries}, but mode {name!r} takes {len(free)}."
        raise entry.error(problem, f"Write {wanted}{beside}.")
    grid = tuple(entry.count(f"grid[{place}]", item, 2) for place, item in enumerate(value))
    product = depth * math.prod(grid)
    if size is not None and size != product:
        factors = ([f"depth {depth}"] if "depth" in fields else []) + [str(number) for number in grid]
        change = f"Write size={product} or leave size out"
        if size % depth == 0:
            change += f"; for size={size}, write grid={example}"
        raise entry.error(f"{' × '.join(factors)} = {product} is not the size {size}.", change + ".")
    return grid


def _equal(
    entry: Entry, name: str, free: tuple[str, ...], size: int | None, depth: int, fields: Mapping[str, object]
) -> tuple[int, ...]:
    """Return axes of equal size from only ``size``."""
    degree = len(free)
    if size is None:
        grid = "" if degree == 1 else f" or grid={(2,) * degree}"
        raise entry.error("size is missing.", f"Write size={depth * 2**degree}{grid}.")
    if size % depth:
        fits = join_choices(_depths(size, degree)[:4])
        sizes = join_choices(depth * base**degree for base in (1, 2, 3))
        change = f"Write depth={fits} for size {size}, or size={sizes} for depth {depth}."
        raise entry.error(f"depth {depth} does not divide size {size}.", change)
    rest = size // depth
    if is_power(rest, degree):
        return (root(rest, degree),) * degree
    shape = _POWERS.get(degree, f"a whole number to the power {degree}")
    sizes = join_choices(depth * number for number in powers_near(rest, degree))
    change = f"Write size={sizes}, or grid={balanced(rest, degree)} with unequal sides"
    if "depth" not in fields:
        raise entry.error(f"mode {name!r} needs {shape}, and size {size} is not one.", change + ".")
    deeper = [other for other in _depths(size, degree) if other != depth]
    raise entry.error(
        f"mode {name!r} needs depth × {shape}, and size {size} / depth {depth} = {rest} is not one.",
        change + (f", or depth={join_choices(deeper[:4])}." if deeper else "."),
    )


def _depths(size: int, degree: int) -> list[int]:
    """Return the depths by which ``size`` is a square (a cube, ...); ``size`` itself is always one."""
    return [d for d in divisors(size) if is_power(size // d, degree)]
