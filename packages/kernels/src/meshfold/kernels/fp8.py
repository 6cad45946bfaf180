"""Matmuls of a linear layer in fp8: operands are scaled, rounded to 8 bits and multiplied with float32 sums.

    forward  y  [m, n] = x wᵀ      summed over k
    dgrad    dx [m, k] = dy w      summed over n
    wgrad    dw [n, k] = dyᵀ x     summed over m

A scale brings the largest magnitude (amax) of a row, along the summed dim, or of a whole tensor to the largest number of
the format. Each product has its own two casts.

============== ================= ============ ================ ==========
recipe         scales            x and w      dy               dw
============== ================= ============ ================ ==========
rowwise        powers of 2, rows e4m3         e4m3             fp8
rowwise_hp_dw  powers of 2, rows e4m3         e4m3             bf16
tensorwise     one a tensor      e4m3         e5m2             fp8
============== ================= ============ ================ ==========

Formulas and recipes are those of torchao's float8 training (pytorch/ao, torchao/float8), with two exceptions: the least amax that
is told from zero is 1e-30 (there 1e-12), and a row with nan or infinity becomes nan, all of it. Casts saturate.

The operands may be blocks of larger ones: a function ``maximum`` then takes the largest amax over the ranks that hold the rest, and
the rounded operands are those of the whole, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

Fp8Dim = Literal["m", "k", "n"]
"""Dim of a matmul ``y[m, n] = x[m, k] w[k, n]``."""
Fp8Maximum = Callable[[Tensor, tuple[Fp8Dim, ...]], Tensor]
"""Function of a block's amax over the named dims that returns that of the whole tensor: the maximum over ranks."""

FP8_MULTIPLE = 16
"""Elements: k and n of an fp8 matmul are multiples of it (cuBLAS); m may be any."""
_LEAST_AMAX = 1e-30  # its scale, and the scale's reciprocal, are normal numbers of float32
_POWER_BITS = 0x7F800000  # of a float32: the exponent


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """A way to scale and round the operands.

    Attributes:
        name: of the table above.
        rows: a scale for each row along the summed dim, a power of 2; else one for the tensor.
        gradient: the format of dy.
        weight_gradient: whether dw is made in fp8; else in the operands' own dtype.
    """

    name: str
    rows: bool
    gradient: torch.dtype = torch.float8_e4m3fn
    weight_gradient: bool = True


FP8_RECIPES: Mapping[str, Fp8Recipe] = {
    "rowwise": Fp8Recipe(name="rowwise", rows=True),
    "rowwise_hp_dw": Fp8Recipe(name="rowwise_hp_dw", rows=True, weight_gradient=False),
    "tensorwise": Fp8Recipe(name="tensorwise", rows=False, gradient=torch.float8_e5m2),
}
"""Recipes by name."""


@dataclass(frozen=True, kw_only=True)
class Fp8Tensor:
    """A matrix in 8 bits.

    Attributes:
        values: ``r c``, row-major; ``c`` is the dim that is summed over.
        inverse: float32, ``r 1`` or a scalar: ``values * inverse`` is what they stand for.
    """

    values: Tensor
    inverse: Tensor

    def dequantize(self) -> Tensor:
        """Return what the values stand for, ``r c`` in float32."""
        return self.values.float() * self.inverse


def to_fp8(
    x: Tensor,
    *,
    rows: bool,
    dtype: torch.dtype = torch.float8_e4m3fn,
    maximum: Callable[[Tensor], Tensor] | None = None,
) -> Fp8Tensor:
    """Scale and round a matrix ``r c``, in any layout of memory.

    Args:
        x: floating point.
        rows: a scale for each row, rounded down to a power of 2; else one for the matrix.
        dtype: float8_e4m3fn or float8_e5m2.
        maximum: from the amax here to the amax of the whole, of which ``x`` is a block.
    """
    largest = torch.finfo(dtype).max
    if x.numel() == 0:
        amax = torch.zeros((x.shape[0], 1) if rows else (), dtype=torch.float32, device=x.device)
    else:
        amax = (x.abs().amax(dim=1, keepdim=True) if rows else x.abs().amax()).float()
    if maximum is not None:  # infinity for nan, which not every reduction hands on
        amax = maximum(torch.where(amax.isfinite(), amax, torch.inf))
    # In float64: compilers divide in float32 with an error, and the eager and the compiled cast must be equal.
    scale = (largest / amax.double().clamp(min=_LEAST_AMAX)).float()
    if rows:
        scale = (scale.view(torch.int32) & _POWER_BITS).view(torch.float32)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    scaled = (x.float() * scale).clamp(-largest, largest)
    return Fp8Tensor(values=scaled.to(dtype).contiguous(), inverse=scale.reciprocal())


def fp8_product(a: Fp8Tensor, b: Fp8Tensor, *, dtype: torch.dtype = torch.bfloat16, fast: bool = True) -> Tensor:
    """Multiply ``r c`` and ``s c`` to ``r s = a bᵀ``.

    Args:
        a, b: both scaled by rows or both as a whole. On a GPU ``c`` and ``s`` are multiples of 16.
        dtype: of the result.
        fast: let the tensor cores sum with fewer bits, as torch's ``use_fast_accum``.
    """
    if a.values.shape[0] == 0:
        return torch.empty(0, b.values.shape[0], dtype=dtype, device=a.values.device)
    by_row = a.inverse.dim() > 0
    return torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.inverse,
        scale_b=b.inverse.t() if by_row else b.inverse,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def fp8_output(x: Tensor, w: Tensor, recipe: Fp8Recipe, maximum: Fp8Maximum | None = None) -> Tensor:
    """Compute ``y = x wᵀ``, ``m k, n k -> m n``, in the dtype of ``x``."""
    a = to_fp8(x, rows=recipe.rows, maximum=_over(maximum, recipe, "m", "k"))
    b = to_fp8(w, rows=recipe.rows, maximum=_over(maximum, recipe, "n", "k"))
    return fp8_product(a, b, dtype=x.dtype)


def fp8_input_gradient(dy: Tensor, w: Tensor, recipe: Fp8Recipe, maximum: Fp8Maximum | None = None) -> Tensor:
    """Compute ``dx = dy w``, ``m n, n k -> m k``, in the dtype of ``dy``."""
    a = to_fp8(dy, rows=recipe.rows, dtype=recipe.gradient, maximum=_over(maximum, recipe, "m", "n"))
    b = to_fp8(w.t(), rows=recipe.rows, maximum=_over(maximum, recipe, "k", "n"))
    return fp8_product(a, b, dtype=dy.dtype, fast=recipe.rows)


def fp8_weight_gradient(dy: Tensor, x: Tensor, recipe: Fp8Recipe, maximum: Fp8Maximum | None = None) -> Tensor:
    """Compute ``dw = dyᵀ x``, ``m n, m k -> n k``, in the dtype of ``dy``; not in fp8 if the recipe says so."""
    if not recipe.weight_gradient:
        return dy.t() @ x
    missing = -dy.shape[0] % FP8_MULTIPLE
    if missing:  # rows of zeros change neither scales nor sums
        dy, x = functional.pad(dy, (0, 0, 0, missing)), functional.pad(x, (0, 0, 0, missing))
    a = to_fp8(dy.t(), rows=recipe.rows, dtype=recipe.gradient, maximum=_over(maximum, recipe, "n", "m"))
    b = to_fp8(x.t(), rows=recipe.rows, maximum=_over(maximum, recipe, "k", "m"))
    return fp8_product(a, b, dtype=dy.dtype, fast=recipe.rows)


def bind_fp8_matmul(recipe: Fp8Recipe, maximum: Fp8Maximum | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the differentiable product ``.. k, n k -> .. n`` of one recipe; torch.compile can trace it.

    ``maximum``: takes an amax over the ranks that hold the rest of the operands; None if there are none.
    """

    class Fp8Matmul(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return fp8_output(x, w, recipe, maximum)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, w = ctx.saved_tensors
            dx = fp8_input_gradient(dy, w, recipe, maximum) if ctx.needs_input_grad[0] else None
            dw = fp8_weight_gradient(dy, x, recipe, maximum) if ctx.needs_input_grad[1] else None
            return dx, dw

    def product(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = Fp8Matmul.apply(x.reshape(-1, x.shape[-1]), w)
        return y.view(*x.shape[:-1], w.shape[0])

    return product


def _over(
    maximum: Fp8Maximum | None, recipe: Fp8Recipe, row: Fp8Dim, summed: Fp8Dim
) -> Callable[[Tensor], Tensor] | None:
    """Bind the dims that an amax is taken over: the summed one, or both."""
    if maximum is None:
        return None
    dims = (summed,) if recipe.rows else (row, summed)
    return lambda amax: maximum(amax, dims)
