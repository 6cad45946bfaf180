"""Layout algebra: the collectives of a sharded matmul follow from three layouts.

For ``y[m,n] = x[m,k] w[k,n]`` with three layouts at rest:

1. The *compute axes* of an index are the longest common prefix of its axes in the two tensors that carry it:
   ``C_m = prefix(x.m, y.m)``, ``C_k = prefix(x.k, w.k)``, ``C_n = prefix(w.n, y.n)``. They cut the m·k·n cube of
   multiplications into one brick a rank, so no axis may be in two of them.
2. Each tensor misses one index. Its *extras*, the axes beyond the prefixes, must be compute axes of the index it
   misses; otherwise ranks would repeat each other's work.
3. x and w are all-gathered over their extras on the way in; y is reduce-scattered over its extras and all-reduced
   over the rest of ``C_k`` on the way out. Backward follows by transposition: dy is gathered over extras(y), dx
   leaves over extras(x) and ``C_n``, dw over extras(w) and ``C_m``.

1D (Megatron, arXiv 1909.08053), 1D with sequence parallelism (2205.05198), 2D (Optimus, 2104.05343), 2.5D
(Tesseract, 2105.14500), 3D (2105.14450) and FSDP are all rows of layouts: see :mod:`meshfold.tensor_parallel.modes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from meshfold.mesh import Layout, LayoutError, Mesh

Operand = Literal["x", "w", "y"]
Phase = Literal["forward", "dx", "dw"]


@dataclass(frozen=True, slots=True)
class Move:
    """One collective of a plan, before sizes are known.

    Attributes:
        phase: the product it serves: forward, the input gradient dx, the weight gradient dw.
        kind: all_gather, reduce_scatter or all_reduce.
        operand: the tensor that moves, ``"dy"`` for the gradient of y and so on.
        dim: the dim gathered or scattered along; empty for an all-reduce.
        axes: the mesh axes; one for a gather or scatter.
    """

    phase: Phase
    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    operand: str
    dim: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        name = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce"}[self.kind]
        along = f" along {self.dim}" if self.dim else ""
        return f"{name} {self.operand}{along} over {', '.join(self.axes)}"


@dataclass(frozen=True, slots=True)
class MatmulPlan:
    """A checked matmul: each rank's product and every collective, derived from three layouts.

    Attributes:
        x, w, y: the layouts at rest, of ``[m, k]``, ``[k, n]``, ``[m, n]``.
        m, k, n: the caller's names of the three indices.
        compute: for each index, the axes that split the multiplications along it.
        entered: x has been gathered by the caller, who also sums and scatters dx (see :meth:`enter`).
    """

    x: Layout
    w: Layout
    y: Layout
    m: str
    k: str
    n: str
    compute: Mapping[str, tuple[str, ...]] = field(compare=False)  # determined by the three layouts
    entered: bool = False

    _extras: Mapping[str, tuple[tuple[str, str], ...]] = field(init=False, repr=False, compare=False)
    _sums: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)
    _steps: Mapping[str, tuple[tuple[int, str], ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute what layers need in every forward."""
        extras: dict[str, tuple[tuple[str, str], ...]] = {}
        sums: dict[str, tuple[str, ...]] = {}
        steps: dict[str, tuple[tuple[int, str], ...]] = {}
        for name, missing, order in (
            ("x", self.n, (self.m, self.k)),
            ("w", self.m, (self.n, self.k)),
            ("y", self.k, (self.m, self.n)),
        ):
            layout: Layout = getattr(self, name)
            extras[name] = tuple((dim, axis) for dim, axes in layout.items() for axis in axes[len(self.compute[dim]) :])
            scattered = {axis for _, axis in extras[name]}
            entered = name == "x" and self.entered
            sums[name] = () if entered else tuple(axis for axis in self.compute[missing] if axis not in scattered)
            steps[name] = tuple((order.index(dim), axis) for dim, axis in extras[name])
        for attribute, value in (("_extras", extras), ("_sums", sums), ("_steps", steps)):
            object.__setattr__(self, attribute, value)

    def enter(self) -> MatmulPlan:
        """Return the plan of a matmul whose input is gathered once for several: x arrives gathered, dx is a partial sum."""
        whole = Layout({self.m: self.compute[self.m], self.k: self.compute[self.k]})
        return replace(self, x=whole, entered=True)

    def extras(self, operand: Operand) -> tuple[tuple[str, str], ...]:
        """Return (dim, axis) pairs beyond the compute prefix, major first: the operand is gathered or scattered over these."""
        return self._extras[operand]

    @property
    def changes_tokens(self) -> bool:
        """True if a rank's x and y have different tokens: one of them is gathered or scattered along m."""
        return any(dim == self.m for operand in ("x", "y") for dim, _ in self._extras[operand])

    def steps(self, operand: Operand) -> tuple[tuple[int, str], ...]:
        """Return the extras with the number of the dim in the tensor: x is ``[m, k]``, w is ``[n, k]``, y is ``[m, n]``."""
        return self._steps[operand]

    def sums(self, operand: Operand) -> tuple[str, ...]:
        """Return the axes that y, dx or dw is all-reduced over when it leaves: the summed index's, less the extras."""
        return self._sums[operand]

    def prepare(self, mesh: Mesh) -> None:
        """Make the process groups of the plan now, if processes are running."""
        for operand in ("x", "w", "y"):
            for _, axis in self._extras[operand]:
                mesh.prepare(axis)
            mesh.prepare(*self._sums[operand])

    @property
    def collectives(self) -> tuple[Move, ...]:
        """Every collective of forward and backward, with the gather lowering, in the order they are issued."""
        moves: list[Move] = []

        def gather(phase: Phase, operand: Operand, name: str) -> None:
            moves.extend(Move(phase, "all_gather", name, dim, (axis,)) for dim, axis in reversed(self.extras(operand)))

        def leave(phase: Phase, operand: Operand, name: str) -> None:
            moves.extend(Move(phase, "reduce_scatter", name, dim, (axis,)) for dim, axis in self.extras(operand))
            if self.sums(operand):
                moves.append(Move(phase, "all_reduce", name, "", self.sums(operand)))

        gather("forward", "x", "x")
        gather("forward", "w", "w")
        leave("forward", "y", "y")
        gather("dx", "y", "dy")  # also used for dw
        gather("dx", "w", "w")
        leave("dx", "x", "dx")
        gather("dw", "x", "x")
        leave("dw", "w", "dw")
        return tuple(moves)

    def local_sizes(self, operand: Operand, sizes: Mapping[str, int], mesh: Mesh) -> dict[str, int]:
        """Return the elements of each dim of an operand's local block, at rest."""
        return {dim: sizes[dim] // mesh.size(*axes) for dim, axes in getattr(self, operand).items()}

    def check_sizes(self, sizes: Mapping[str, int], mesh: Mesh) -> None:
        """Raise a LayoutError if a size is missing or not a multiple of the ranks that split it."""
        for name in ("x", "w", "y"):
            layout: Layout = getattr(self, name)
            for dim, axes in layout.items():
                if dim not in sizes:
                    raise LayoutError(f"no size for {dim!r}: give one for each of {self.m}, {self.k} and {self.n}")
                blocks = mesh.size(*axes)
                if sizes[dim] % blocks:
                    below = sizes[dim] // blocks * blocks
                    raise LayoutError(
                        f"{dim} = {sizes[dim]} cannot be split over {', '.join(axes)} ({blocks} blocks) as layout "
                        f"{name} = {str(layout)!r} asks: use a multiple of {blocks}, such as "
                        + (f"{below} or {below + blocks}" if below else f"{blocks}")
                    )

    def __str__(self) -> str:
        def axes(index: str) -> str:
            return ", ".join(self.compute[index]) or "–"

        lines = [
            f"y[{self.m},{self.n}] = x[{self.m},{self.k}] w[{self.k},{self.n}]",
            f"  at rest   x {self.x}   w {self.w}   y {self.y}",
            f"  compute   {self.m} over {axes(self.m)}; {self.k} over {axes(self.k)}; {self.n} over {axes(self.n)}",
        ]
        for phase in ("forward", "dx", "dw"):
            moves = [str(move) for move in self.collectives if move.phase == phase]
            lines.append(f"  {phase:<9} {'; '.join(moves) or 'no communication'}")
        return "\n".join(lines)


def plan(x: str | Layout, w: str | Layout, y: str | Layout) -> MatmulPlan:
    """Check ``y = x w`` for three layouts and derive its collectives.

    >>> print(plan(x="m:row k:col", w="k:row n:col", y="m:row n:col"))
    y[m,n] = x[m,k] w[k,n]
      at rest   x m:row k:col   w k:row n:col   y m:row n:col
      compute   m over row; k over –; n over col
      forward   all-gather x along k over col; all-gather w along k over row
      dx        all-gather w along k over row; reduce-scatter dx along k over col
      dw        all-gather x along k over col; reduce-scatter dw along k over row

    Args:
        x: layout of the input, ``m k``.
        w: layout of the weight, ``k n``.
        y: layout of the output, ``m n``. The names of the dims are free.

    Raises:
        LayoutError: if the three do not describe a matmul, or one that repeats work.
    """
    return _plan(Layout.parse(x), Layout.parse(w), Layout.parse(y))


@lru_cache(maxsize=1024)
def _plan(x: Layout, w: Layout, y: Layout) -> MatmulPlan:
    written = f"x={str(x)!r}, w={str(w)!r}, y={str(y)!r}"
    for name, layout in (("x", x), ("w", w), ("y", y)):
        if len(layout) != 2:
            raise LayoutError(
                f"{name}={str(layout)!r} has {len(layout)} dims: a matmul's tensors have two each ({written})"
            )
    shared = {pair: set(a) & set(b) for pair, a, b in (("xw", x, w), ("xy", x, y), ("wy", w, y))}
    if any(len(dims) != 1 for dims in shared.values()) or len(set(x) | set(w) | set(y)) != 3:
        raise LayoutError(
            f"{written} is not a matmul: x and w must share one dim (the summed one), x and y another, w and y the "
            f"third, as in x='m k', w='k n', y='m n'"
        )
    (m,), (k,), (n,) = shared["xy"], shared["xw"], shared["wy"]
    compute = {m: _prefix(x[m], y[m]), k: _prefix(x[k], w[k]), n: _prefix(w[n], y[n])}
    owner: dict[str, str] = {}
    for index, axes in compute.items():
        for axis in axes:
            if axis in owner:
                raise LayoutError(
                    f"axis {axis!r} would split the multiplications along both {owner[axis]} and {index}: each rank "
                    f"would compute only a part of its output; split one of them over another axis ({written})"
                )
            owner[axis] = index
    found = MatmulPlan(x=x, w=w, y=y, m=m, k=k, n=n, compute=compute)
    operands: tuple[tuple[Operand, str], ...] = (("x", n), ("w", m), ("y", k))
    for operand, missing in operands:
        for dim, axis in found.extras(operand):
            if axis not in compute[missing]:
                raise LayoutError(
                    f"axis {axis!r} splits {dim} of {operand} ({str(getattr(found, operand))!r}) but no multiplication: "
                    f"ranks along it would repeat each other's work. Either {dim} is split alike in the other tensor that "
                    f"has it, or {axis!r} also splits {missing} in the two tensors that have that ({written})"
                )
    return found


def _prefix(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return a[:length]
