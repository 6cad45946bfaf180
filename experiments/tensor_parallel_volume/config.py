"""What is counted: modes, meshes and sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Sizes = dict[str, int]

ITEMSIZE = 4  # float32 throughout, row statistics of norms included: bytes / 4 are elements everywhere


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes in elements. All are far above what the splits need; nothing is ever allocated (meta tensors).

    Attributes:
        max_ranks: the largest mesh.
        shapes: m, k and n of one linear layer. ``square`` is the normalisation of Colossal-AI's table,
            |X| = |W| = |Y|; in ``mixed`` (3 : 5 : 7) no term of a formula can hide in another; ``tall`` has
            |X| = 16 |W|, as many tokens on small layers do.
        hidden, heads, batch, sequence: of the transformer layer.
        isoefficiency_max_ranks: the fit needs a long tail, so it goes further than the tables.
        isoefficiency_hidden: hidden size of that layer, with as many tokens as hidden elements.
    """

    max_ranks: int = 512
    shapes: dict[str, Sizes] = field(
        default_factory=lambda: {
            "square": {"m": 8192, "k": 8192, "n": 8192},
            "mixed": {"m": 3 * 4096, "k": 5 * 4096, "n": 7 * 4096},
            "tall": {"m": 131072, "k": 8192, "n": 8192},
        }
    )
    hidden: int = 8192
    heads: int = 512
    batch: int = 64
    sequence: int = 512
    isoefficiency_max_ranks: int = 4096
    isoefficiency_hidden: int = 8192

    @property
    def tokens(self) -> int:
        """Tokens of the transformer layer's input: b s."""
        return self.batch * self.sequence


RANKS = (4, 8, 16, 32, 64, 128, 256, 512)
DEPTHS = (2, 4, 8)


def meshes(config: Config) -> list[tuple[str, dict[str, int]]]:
    """(mode, axes) of every row of the tables, by mode, then size."""
    sizes = [p for p in RANKS if p <= config.max_ranks]
    found: list[tuple[str, dict[str, int]]] = []
    found += [("1d", {"tensor": p}) for p in sizes]
    found += [("1d+sequence", {"tensor": p}) for p in sizes]
    found += [("2d", grid_2d(p)) for p in sizes]
    for depth in DEPTHS:
        for p in sizes:
            q = _root(p // depth) if p % depth == 0 else 0
            if q > 1:
                found.append(("2.5d", cuboid(depth, q)))
    found += [("3d", grid_3d(p)) for p in sizes]
    return found


def isoefficiency_meshes(config: Config) -> list[tuple[str, dict[str, int]]]:
    """(mode, axes) of the isoefficiency fit: the sizes that published formulas speak of, to a longer tail."""
    found: list[tuple[str, dict[str, int]]] = []
    squares = [4**i for i in range(1, 16) if 4**i <= config.isoefficiency_max_ranks]
    cubes = [8**i for i in range(1, 11) if 8**i <= config.isoefficiency_max_ranks]
    found += [("1d", {"tensor": p}) for p in squares]
    found += [("1d+sequence", {"tensor": p}) for p in squares]
    found += [("2d", grid_2d(p)) for p in squares]
    found += [("3d", grid_3d(p)) for p in cubes]
    return found


def isoefficiency_sizes(config: Config, times: int) -> dict[str, int]:
    """Hidden size, heads, batch and sequence of the isoefficiency layer, b s = h, with ``times`` its hidden size."""
    hidden = config.isoefficiency_hidden * times
    batch = 256  # the most that a mesh of 4096 ranks splits it into: a · b of 16 × 16 × 16
    return {"hidden": hidden, "heads": 4096, "batch": batch, "sequence": hidden // batch}


def grid_2d(p: int) -> dict[str, int]:
    """The most nearly square grid of a power of two, the larger axis last: 8 is 2 × 4."""
    bits = p.bit_length() - 1
    return {"row": 2 ** (bits // 2), "col": 2 ** (bits - bits // 2)}


def grid_3d(p: int) -> dict[str, int]:
    """The most nearly cubic grid of a power of two, the larger axes last; 4 is 2 × 2 × 1."""
    bits = p.bit_length() - 1
    if bits == 2:
        return {"a": 2, "b": 2, "c": 1}
    return {axis: 2 ** ((bits + place) // 3) for place, axis in enumerate("abc")}


def cuboid(depth: int, q: int) -> dict[str, int]:
    """The axes of 2.5D on squares."""
    return {"depth": depth, "row": q, "col": q}


def side(axes: dict[str, int]) -> int:
    """q of a square grid (2D, 2.5D) or a cube (3D); 0 where the grid is not one."""
    edges = {size for axis, size in axes.items() if axis != "depth"}
    return edges.pop() if len(edges) == 1 else 0


def ranks(axes: dict[str, int]) -> int:
    """The product of the axes."""
    product = 1
    for size in axes.values():
        product *= size
    return product


def _root(n: int) -> int:
    """The exact square root of a number, or 0."""
    root = math.isqrt(n)
    return root if root**2 == n else 0
