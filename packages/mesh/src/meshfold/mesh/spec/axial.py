"""The entry ``axial``: how the pair and MSA tensors of a folding model are split. Weights stay whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshfold.mesh.spec.entry import Entry, balanced, divisors, join_choices

MODES = ("dap", "grid")
KEYS = ("mode", "size", "rows", "columns", "depth", "memory")


@dataclass(frozen=True, kw_only=True)
class AxialSpec:
    """The checked entry ``axial``.

    Attributes:
        mode: ``dap``: rows of a pair tensor over one axis. ``grid``: rows and columns over two.
        rows: ranks that rows are split over, depth apart.
        columns: ranks that columns are split over; 1 for ``dap``.
        depth: of a grid: ranks that rows are split over first, such as machines.
        memory: bytes that the tensors of each stack of blocks may have at once on a rank; a plan chooses chunks and recomputation.
            None: no limit.
    """

    mode: str
    rows: int
    columns: int = 1
    depth: int = 1
    memory: int | None = None

    @classmethod
    def parse(cls, value: object) -> AxialSpec:
        """Check ``4``, ``dict(mode="dap", size=4)`` or ``dict(mode="grid", rows=2, columns=2)``. Raises SpecError."""
        entry = Entry(name="axial", value=value)
        if isinstance(value, int):
            return cls(mode="dap", rows=entry.count("axial", value, 2))
        fields = entry.fields(KEYS, "axial=2 or axial=dict(mode='grid', rows=2, columns=2)")
        mode = entry.choice("mode", fields.get("mode", "dap"), MODES)
        counts = {key: entry.count(key, fields[key], 2) for key in KEYS[1:-1] if key in fields}
        memory = entry.bytes("memory", fields["memory"], "60GiB") if "memory" in fields else None
        if mode == "dap":
            for key in ("rows", "columns", "depth"):
                if key in counts:
                    raise entry.error(
                        f"mode 'dap' takes no {key}: it splits over one axis.", "Write size=4, or mode='grid'."
                    )
            if "size" not in counts:
                raise entry.error("size is missing.", "Write size=2 to split over two ranks.")
            return cls(mode=mode, rows=counts["size"], memory=memory)
        return replace(cls._grid(entry, counts), memory=memory)

    @classmethod
    def _grid(cls, entry: Entry, counts: Mapping[str, int]) -> AxialSpec:
        depth = counts.get("depth", 1)
        if "size" in counts and ("rows" in counts or "columns" in counts):
            raise entry.error("size is rows × columns × depth.", "Leave size out.")
        if "size" in counts:
            if counts["size"] % depth:
                fits = join_choices(divisors(counts["size"])[:8])
                raise entry.error(f"depth {depth} does not divide size {counts['size']}.", f"Write depth={fits}.")
            rows, columns = balanced(counts["size"] // depth, 2)
            return cls(mode="grid", rows=rows, columns=columns, depth=depth)
        for key in ("rows", "columns"):
            if key not in counts:
                raise entry.error(f"{key} is missing.", "Write rows=2, columns=2, or size=4.")
        return cls(mode="grid", rows=counts["rows"], columns=counts["columns"], depth=depth)

    @property
    def mode_name(self) -> str:
        """The row of the table of axial modes."""
        return "grid+depth" if self.depth > 1 else self.mode

    @property
    def axes(self) -> dict[str, int]:
        """Axis name to size, outermost first."""
        if self.mode == "dap":
            return {"axial": self.rows}
        return {**({"depth": self.depth} if self.depth > 1 else {}), "row": self.rows, "col": self.columns}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.axes.values())

    def to_dict(self) -> dict[str, object]:
        """Return the entry that parses to this."""
        memory = {} if self.memory is None else {"memory": self.memory}
        if self.mode == "dap":
            return {"mode": "dap", "size": self.rows, **memory}
        depth = {"depth": self.depth} if self.depth > 1 else {}
        return {"mode": "grid", "rows": self.rows, "columns": self.columns, **depth, **memory}
