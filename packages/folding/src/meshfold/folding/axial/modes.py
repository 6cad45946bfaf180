"""The axial modes: one table of layouts, in the words of :mod:`meshfold.tensor_parallel.modes`.

A pair tensor is ``[i, j, c]``, an MSA ``[s, r, c]`` (sequences, residues). A mode says which mesh axes split these dims;
channels and weights are whole on every rank. Everything else (collectives, bytes, gradients) is derived. To make your own
mode, write its row::

    AxialMode(name="mine", axes=("a", "b"), pair="i:a,b j", attention="exchange")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshfold.mesh import Layout, LayoutError, did_you_mean

Keys = Literal["exchange", "gather", "ring"]


@dataclass(frozen=True, kw_only=True)
class AxialMode:
    """A row of the table.

    The MSA lies as the pair tensor does: its sequences are split as i, its residues as j. A single representation
    ``[r, c]`` is split over all axes.

    Attributes:
        name: what users write.
        axes: its mesh axes, outermost first.
        pair: layout of the pair tensor, ``i j``.
        attention: how the keys of a row that several ranks share come together. ``"exchange"``: an all-to-all switches to
            whole rows and back. ``"gather"``: keys and values are all-gathered. ``"ring"``: they pass from rank to rank.
        paper: where it comes from.

    Raises:
        LayoutError: for other dims, an axis that is missing or unused, or an unknown ``attention``.
    """

    name: str
    axes: tuple[str, ...]
    pair: str
    attention: Keys = "exchange"
    paper: str = ""

    def __post_init__(self) -> None:
        layout = self.layout
        if list(layout) != ["i", "j"]:
            raise LayoutError(
                f"axial mode {self.name!r}: pair={self.pair!r} must have the dims 'i j', in this order, as in 'i:row j:col'"
            )
        if sorted(layout.axes) != sorted(self.axes):
            raise LayoutError(
                f"axial mode {self.name!r}: pair={self.pair!r} is split over {', '.join(layout.axes) or 'no axis'}, and its "
                f"axes are {', '.join(self.axes) or 'none'}: each must split i or j, or ranks would repeat each other's work"
            )
        if self.attention not in ("exchange", "gather", "ring"):
            raise LayoutError(
                f"axial mode {self.name!r}: attention={self.attention!r} is not known: use 'exchange', 'gather' or 'ring'"
            )

    @property
    def layout(self) -> Layout:
        """The layout of the pair tensor, parsed."""
        return Layout.parse(self.pair)

    @property
    def rows(self) -> tuple[str, ...]:
        """The axes that split i of a pair tensor and the sequences of an MSA."""
        return self.layout["i"]

    @property
    def columns(self) -> tuple[str, ...]:
        """The axes that split j of a pair tensor and the residues of an MSA."""
        return self.layout["j"]


AXIAL_MODES: dict[str, AxialMode] = {
    mode.name: mode
    for mode in (
        AxialMode(name="dap", axes=("axial",), pair="i:axial j", paper="arXiv 2203.00854"),
        AxialMode(name="grid", axes=("row", "col"), pair="i:row j:col", attention="ring", paper="arXiv 2603.14806"),
        AxialMode(name="grid+depth", axes=("depth", "row", "col"), pair="i:depth,row j:col", attention="ring"),
    )
}
"""The built-in axial modes by name."""


def find_axial_mode(mode: str | AxialMode) -> AxialMode:
    """Return a built-in axial mode by name, or the mode itself.

    Raises:
        LayoutError: for an unknown name.
    """
    if isinstance(mode, AxialMode):
        return mode
    if not isinstance(mode, str) or mode not in AXIAL_MODES:
        hint = did_you_mean(mode, AXIAL_MODES) if isinstance(mode, str) else ""
        raise LayoutError(
            f"no axial mode {mode!r}.{hint} There are {', '.join(AXIAL_MODES)}, or make an AxialMode of your own"
        )
    return AXIAL_MODES[mode]
