"""Matmuls of a linear layer in fp8: operands are scaled, rounded to 8 bits and multiplied with float32 sums.

    forward  y  [m, n] = x wᵀ      summed over k
    dgrad    dx [m, k] = dy w      summed over n
    wgrad    dw [n, k] = dyᵀ x     summed over m

A scale brings the largest magnitude (amax) of a row, along the summed dim, or of a whole tensor to the largest number of
the format. Each product has its own two casts.

============== ================== ============ ================ ==========
recipe         scales             x and w      dy               dw
============== ================== ============ ================ ==========
rowwise        powers of 2, rows  e4m3         e4m3             fp8
rowwise_hp_dw  powers of 2, rows  e4m3         e4m3             bf16
tensorwise     one a tensor       e4m3         e5m2             fp8
block128       powers of 2, tiles e4m3         e4m3             fp8
============== ================== ============ ================ ==========

A tile of ``block128`` is 1 x 128 elements along the summed dim of x and dy, and 128 x 128 of w, as in DeepSeek-V3 (arXiv
2412.19437, section 3.3); its scale is a power of 2, so rounded operands are exact in bf16. If a block of a larger operand has sides
that are multiples of 128, its tiles are the whole operand's: nothing is reduced.

Formulas and recipes follow torchao's float8 training (pytorch/ao, torchao/float8), with two exceptions. The smallest amax that
differs from zero is 1e-30 (there 1e-12). A row with nan or infinity becomes nan completely. Casts saturate.

The operands may be blocks of larger ones: a function ``maximum`` then takes the largest amax over the ranks that hold the rest. The
rounded operands equal the whole operand's, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from meshfold.kernels.fp8_casts import LEAST_AMAX, cast_matrix, cast_matrix_both, cast_turned_over, power_scale
from meshfold.kernels.functions import as_dtype

Fp8Dim = Literal["m", "k", "n"]
"""Dim of a matmul ``y[m, n] = x[m, k] w[k, n]``."""
Fp8Maximum = Callable[[Tensor, tuple[Fp8Dim, ...]], Tensor]
"""Function that maps a block's amax over the named dims to the whole tensor's: the maximum over ranks.

It may have a method ``reduces(dims)``, which returns False where a rank has all of these dims.
"""

FP8_MULTIPLE = 16
"""Elements: k and n of an fp8 matmul are multiples of it (cuBLAS); m may be any."""


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """A way to scale and round the operands.

    Attributes:
        name: of the table above.
        rows: a scale for each row along the summed dim, a power of 2; else one for the tensor.
        block: elements of a side of a tile, each with a scale of its own; 0: none.
        gradient: the format of dy.
        weight_gradient: whether dw is made in fp8; else in the operands' own dtype.
    """

    name: str
    rows: bool
    block: int = 0
    gradient: torch.dtype = torch.float8_e4m3fn
    weight_gradient: bool = True

    @property
    def multiple(self) -> int:
        """Elements that k and n of a matmul are multiples of."""
        return max(FP8_MULTIPLE, self.block)


FP8_RECIPES: Mapping[str, Fp8Recipe] = {
    "rowwise": Fp8Recipe(name="rowwise", rows=True),
    "rowwise_hp_dw": Fp8Recipe(name="rowwise_hp_dw", rows=True, weight_gradient=False),
    "tensorwise": Fp8Recipe(name="tensorwise", rows=False, gradient=torch.float8_e5m2),
    "block128": Fp8Recipe(name="block128", rows=True, block=128),
}
"""Recipes by name."""


@dataclass(frozen=True, kw_only=True)
class Fp8Tensor:
    """A matrix in 8 bits.

    Attributes:
        values: ``r c``, row-major; ``c`` is the dim that is summed over.
        inverse: float32, ``r 1``, a scalar, or one for each tile: ``values * inverse`` are the decoded values.
        tile: sides of a tile; None without tiles.
    """

    values: Tensor
    inverse: Tensor
    tile: tuple[int, int] | None = None

    def dequantize(self) -> Tensor:
        """Return the represented values, ``r c`` in float32."""
        if self.tile is None:
            return self.values.float() * self.inverse
        return (_tiles(self.values.float(), self.tile) * self.inverse[:, None, :, None]).view(self.values.shape)


def to_fp8(
    x: Tensor,
    *,
    rows: bool,
    dtype: torch.dtype = torch.float8_e4m3fn,
    tile: tuple[int, int] | None = None,
    maximum: Callable[[Tensor], Tensor] | None = None,
) -> Fp8Tensor:
    """Scale and round a matrix ``r c``, in any layout of memory.

    Args:
        x: floating point.
        rows: a scale for each row, rounded down to a power of 2; else one for the matrix.
        dtype: float8_e4m3fn or float8_e5m2.
        tile: a scale for each tile with these sides, which divide the matrix's sides, rounded down to a power of 2.
        maximum: from this block's amax to the amax of the whole.
    """
    if rows and tile is None and maximum is None and dtype is torch.float8_e4m3fn and x.numel():
        values, inverse = cast_matrix(x)
        return Fp8Tensor(values=values, inverse=inverse)
    largest = torch.finfo(dtype).max
    if tile is not None:
        whole, x = x.shape, _tiles(x, tile)
        amax = (x.abs().amax((1, 3)) if x.numel() else x.new_zeros(x.shape[0], x.shape[2])).float()
    elif x.numel() == 0:
        amax = torch.zeros((x.shape[0], 1) if rows else (), dtype=torch.float32, device=x.device)
    else:
        amax = (x.abs().amax(dim=1, keepdim=True) if rows else x.abs().amax()).float()
    if maximum is not None:  # replace NaN by infinity: not every reduction propagates NaN
        amax = maximum(torch.where(amax.isfinite(), amax, torch.inf))
    scale = fp8_scale(amax, largest, rows=rows)
    if tile is not None:
        scaled = (x.float() * scale[:, None, :, None]).clamp(-largest, largest)
        return Fp8Tensor(values=scaled.to(dtype).reshape(whole), inverse=scale.reciprocal(), tile=tile)
    scaled = (x.float() * scale).clamp(-largest, largest)
    return Fp8Tensor(values=scaled.to(dtype).contiguous(), inverse=scale.reciprocal())


def fp8_scale(amax: Tensor, largest: float, *, rows: bool) -> Tensor:
    """Return the scales that bring an amax to the largest number of a format, float32; powers of 2 if they are of rows."""
    if rows:
        return power_scale(amax, largest)
    return torch.where(amax.isfinite(), (largest / amax.double().clamp(min=LEAST_AMAX)).float(), torch.nan)


_CPU_SCALES_ROWS = torch.__version__ >= "2.13"
"""torch 2.11 takes one scale for a tensor on a CPU"""


def fp8_product(a: Fp8Tensor, b: Fp8Tensor, *, dtype: torch.dtype = torch.bfloat16, fast: bool = True) -> Tensor:
    """Multiply ``r c`` and ``s c`` to ``r s = a bᵀ``.

    Args:
        a, b: both scaled by rows or both as a whole. On a GPU ``c`` and ``s`` are multiples of 16.
        dtype: of the result.
        fast: let the tensor cores sum with fewer bits, as torch's ``use_fast_accum``.
    """
    if a.values.shape[0] == 0:
        return torch.empty(0, b.values.shape[0], dtype=dtype, device=a.values.device)
    if a.tile is not None:
        return tiled_product(a, b, dtype)
    by_row = a.inverse.dim() > 0
    left, right = a.inverse, b.inverse.t() if by_row else b.inverse
    if a.values.device.type == "cpu":
        if not _CPU_SCALES_ROWS:
            return as_dtype(a.values.float() @ b.values.float().t() * left * right, dtype)
        # oneDNN takes one scale for a tensor, and without fp8 in the processor multiplies 300 times as slowly as torch's own loop.
        left = left.expand(a.values.shape[0], 1).contiguous()
        right = right.expand(1, b.values.shape[0]).contiguous()
    return torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=left,
        scale_b=right,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


class Fp8Casts:
    """A matrix ``m c`` of tokens, and its casts for products that sum over c or over m: each is made once, when first asked for.

    An input x has c = k, a gradient dy has c = n. Products of one weight, or of several that read one input, share the object.

    Attributes:
        matrix: the operand before it is cast.
    """

    def __init__(
        self,
        matrix: Tensor,
        recipe: Fp8Recipe,
        maximum: Fp8Maximum | None = None,
        *,
        dim: Fp8Dim = "k",
        rows: Fp8Tensor | None = None,
    ) -> None:
        """Args:
        matrix: ``m c``.
        recipe: scales and formats.
        maximum: maps a block's amax to the whole tensor's.
        dim: c: ``"n"`` for a gradient, which has the recipe's format of gradients.
        rows: the cast that sums over c, if it exists already.
        """
        self.matrix = matrix
        self._recipe, self._maximum, self._dim = recipe, maximum, dim
        self._dtype = recipe.gradient if dim == "n" else torch.float8_e4m3fn
        self._rows = rows
        self._columns: Fp8Tensor | None = None

    def make_both(self) -> Fp8Casts:
        """Make both casts now, in fewer passes over the matrix where the recipe and the ranks let it; return the object."""
        recipe, matrix, over = self._recipe, self.matrix, _over(self._maximum, self._recipe, self._dim, "m")
        if not self._is_plain or matrix.shape[0] % recipe.multiple or _over(self._maximum, recipe, "m", self._dim):
            return self
        both = cast_matrix_both(matrix) if over is None else cast_turned_over(matrix, over, both=True)
        if both is not None:
            self._rows = Fp8Tensor(values=both[0][0], inverse=both[0][1])
            self._columns = Fp8Tensor(values=both[1][0], inverse=both[1][1])
        return self

    def rows(self) -> Fp8Tensor:
        """Return ``m c``, for a product that sums over c."""
        if self._rows is None:
            over = _over(self._maximum, self._recipe, "m", self._dim)
            self._rows = _cast(self.matrix, self._recipe, over, self._dtype)
        return self._rows

    def columns(self) -> Fp8Tensor:
        """Return ``c m``, for a product that sums over m, which is filled up with zeros to a multiple of :data:`FP8_MULTIPLE`."""
        if self._columns is None:
            matrix = self.matrix
            missing = -matrix.shape[0] % self._recipe.multiple
            if missing:  # rows of zeros change no scale and no sum
                matrix = functional.pad(matrix, (0, 0, 0, missing))
            over = _over(self._maximum, self._recipe, self._dim, "m")
            turned = cast_turned_over(matrix, over, both=False) if over is not None and self._is_plain else None
            if turned is not None:
                self._columns = Fp8Tensor(values=turned[1][0], inverse=turned[1][1])
            else:
                self._columns = _cast(matrix.t(), self._recipe, over, self._dtype)
        return self._columns

    @property
    def _is_plain(self) -> bool:
        """True if the casts have scales of rows and the format of the kernels."""
        return self._recipe.rows and not self._recipe.block and self._dtype is torch.float8_e4m3fn

    def free_rows(self) -> None:
        """Release the cast that sums over c."""
        self._rows = None


def fp8_output(
    x: Tensor | Fp8Casts, w: Tensor | Fp8Tensor, recipe: Fp8Recipe, maximum: Fp8Maximum | None = None
) -> Tensor:
    """Compute ``y = x wᵀ``, ``m k, n k -> m n``, in the dtype of ``x``; ``w`` may be the first of :func:`fp8_cast_weight`."""
    given = x if isinstance(x, Fp8Casts) else Fp8Casts(x, recipe, maximum)
    a = given.rows()
    b = w if isinstance(w, Fp8Tensor) else _cast(w, recipe, _over(maximum, recipe, "n", "k"), weight=True)
    return fp8_product(a, b, dtype=given.matrix.dtype)


def fp8_input_gradient(
    dy: Tensor | Fp8Casts, w: Tensor | Fp8Tensor, recipe: Fp8Recipe, maximum: Fp8Maximum | None = None
) -> Tensor:
    """Compute ``dx = dy w``, ``m n, n k -> m k``, in the dtype of ``dy``; ``w`` may be the second of :func:`fp8_cast_weight`."""
    given = dy if isinstance(dy, Fp8Casts) else Fp8Casts(dy, recipe, maximum, dim="n")
    a = given.rows()
    b = w if isinstance(w, Fp8Tensor) else _cast(w.t(), recipe, _over(maximum, recipe, "k", "n"), weight=True)
    return fp8_product(a, b, dtype=given.matrix.dtype, fast=recipe.rows)


def fp8_cast_weight(w: Tensor, recipe: Fp8Recipe, maximum: Fp8Maximum | None = None) -> tuple[Fp8Tensor, Fp8Tensor]:
    """Cast a weight ``n k`` for both of its products: as ``n k`` for y and ``k n`` for dx, to the bits of a cast in each."""
    rows, columns = _over(maximum, recipe, "n", "k"), _over(maximum, recipe, "k", "n")
    if recipe.rows and not recipe.block and rows is None and columns is None:
        both = cast_matrix_both(w)
        if both is not None:
            return Fp8Tensor(values=both[0][0], inverse=both[0][1]), Fp8Tensor(values=both[1][0], inverse=both[1][1])
    a = _cast(w, recipe, rows, weight=True)
    if recipe.rows and not recipe.block:
        return a, _cast(w.t(), recipe, columns, weight=True)
    # One scale for both directions: of the tensor, or of a tile with equal sides.
    turned = a.inverse if a.tile is None else a.inverse.t().contiguous()
    return a, Fp8Tensor(values=a.values.t().contiguous(), inverse=turned, tile=a.tile)


def fp8_weight_gradient(
    dy: Tensor | Fp8Casts, x: Tensor | Fp8Casts, recipe: Fp8Recipe, maximum: Fp8Maximum | None = None
) -> Tensor:
    """Compute ``dw = dyᵀ x``, ``m n, m k -> n k``, in the dtype of ``dy``; not in fp8 if the recipe says so."""
    left = dy if isinstance(dy, Fp8Casts) else Fp8Casts(dy, recipe, maximum, dim="n")
    right = x if isinstance(x, Fp8Casts) else Fp8Casts(x, recipe, maximum)
    if not recipe.weight_gradient:
        return left.matrix.t() @ right.matrix
    return fp8_product(left.columns(), right.columns(), dtype=left.matrix.dtype, fast=recipe.rows)


def fp8_gradient_casts(
    dy: Tensor, recipe: Fp8Recipe, maximum: Fp8Maximum | None = None, *, wants: tuple[bool, bool] = (True, True)
) -> Fp8Casts:
    """Return the casts of a gradient ``m n``, both at once if dx and dw are needed and both are products in fp8."""
    casts = Fp8Casts(dy, recipe, maximum, dim="n")
    return casts.make_both() if all(wants) and recipe.weight_gradient else casts


def scaled_alone(recipe: Fp8Recipe, maximum: Fp8Maximum | None) -> bool:
    """Return True if an input's cast for y has a scale for each row, a power of 2, that this rank finds by itself."""
    return recipe.rows and not recipe.block and _over(maximum, recipe, "m", "k") is None


def _cast(
    x: Tensor,
    recipe: Fp8Recipe,
    maximum: Callable[[Tensor], Tensor] | None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    weight: bool = False,
) -> Fp8Tensor:
    tile = (recipe.block if weight else 1, recipe.block) if recipe.block else None
    return to_fp8(x, rows=recipe.rows, dtype=dtype, tile=tile, maximum=maximum)


def _tiles(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """``r c -> r/h h c/w w``, in any layout of memory."""
    (rows, columns), (high, wide) = x.shape, tile
    return x.reshape(rows // high, high, columns // wide, wide)


def tiled_product(a: Fp8Tensor, b: Fp8Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply operands in tiles: by torch where it does on this GPU, else in bf16, in which they are exact."""
    if a.values.is_cuda and multiplies_tiles(a.values.device.index or 0):
        return _scaled_product(a, b, dtype)
    return as_dtype(a.dequantize().bfloat16() @ b.dequantize().bfloat16().t(), dtype)


def _scaled_product(a: Fp8Tensor, b: Fp8Tensor, dtype: torch.dtype) -> Tensor:
    kinds = {1: functional.ScalingType.BlockWise1x128, 128: functional.ScalingType.BlockWise128x128}
    (high, _), (b_high, _) = a.tile or (1, 128), b.tile or (1, 128)
    inverse = b.inverse
    if b_high > 1:  # cuBLAS reads scales in groups of four
        inverse = functional.pad(inverse, (0, -inverse.shape[1] % 4)).contiguous().t()
    else:
        inverse = inverse.t().contiguous().t()
    product: Tensor = functional.scaled_mm(
        a.values,
        b.values.t(),
        a.inverse.t().contiguous().t(),
        kinds[high],
        inverse,
        kinds[b_high],
        output_dtype=dtype,
    )
    return product


@functools.cache
def _tried(device: int) -> bool:
    """Try small tiled products on a GPU: not every GPU, torch and cuBLAS has them, and their layouts changed between versions."""
    place = torch.device("cuda", device)
    random = torch.Generator().manual_seed(0)
    for high in (1, 128):
        x, w = (torch.randn(rows, 640, generator=random).to(place, torch.bfloat16) for rows in (256, 384))
        x[:, 200:] *= 64  # make the scales differ
        w[100:] *= 16
        a, b = to_fp8(x, rows=True, tile=(1, 128)), to_fp8(w, rows=True, tile=(high, 128))
        want = a.dequantize() @ b.dequantize().t()
        try:
            got = _scaled_product(a, b, torch.bfloat16)
        except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError):
            return False
        if not torch.allclose(got.float(), want, rtol=2**-6, atol=float(want.abs().max()) * 2**-8):
            return False
    return True


def multiplies_tiles(device: int) -> bool:
    """Return True if torch multiplies operands in tiles on a GPU, found by trial."""
    return _tried(device)


# torch.compile treats the result as a constant instead of tracing the trial.
multiplies_tiles._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _over(
    maximum: Fp8Maximum | None, recipe: Fp8Recipe, row: Fp8Dim, summed: Fp8Dim
) -> Callable[[Tensor], Tensor] | None:
    """Bind the dims over which an amax is reduced: the summed one, or both."""
    if maximum is None or recipe.block:  # each tile is on one rank
        return None
    dims = (summed,) if recipe.rows else (row, summed)
    reduces = getattr(maximum, "reduces", None)
    if reduces is not None and not reduces(dims):  # one rank has all of it
        return None
    return lambda amax: maximum(amax, dims)
