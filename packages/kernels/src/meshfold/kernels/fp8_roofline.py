"""Time that fp8 saves, or costs, in a linear layer, by a roofline.

A layer of n outputs and k inputs on a rank multiplies three times, ``2 m n k`` operations each for m tokens, in fp8 as often as its
recipe says. A compiled cast reads an operand and writes it in one byte an element. If the amax runs along the other dim, or over a
whole tensor, it reads the operand twice. Weights are cast once for all tokens::

    bf16   6 n k / BF16
    fp8    (4 or 6) n k / FP8 + (2 or 0) n k / BF16 + (bytes cast a token + bytes of the weight's casts / m) / BANDWIDTH

What this leaves out (launches, tiles that fill no multiprocessor) makes narrow layers slower still.
"""

from __future__ import annotations

from meshfold.kernels.fp8 import Fp8Recipe

_BF16, _FP8 = 660e12, 1300e12
"""Operations a second of a matmul in bf16 and in fp8, measured on one H200."""
_BANDWIDTH = 4.1e12
"""Bytes a second of a pass over memory there."""
_ONE_PASS, _TWO_PASSES = 3, 5  # bytes per element: read once or twice in bf16, written in fp8


def fp8_gain(n: int, k: int, recipe: Fp8Recipe, tokens: int | None = None) -> float:
    """Return the seconds a token that fp8 saves in a layer, forward and backward; negative if it costs time.

    Args:
        n, k: outputs and inputs of the layer on a rank.
        recipe: scales and formats.
        tokens: on a rank; None: enough that the casts of weights are negligible.
    """
    saved = (6 if recipe.weight_gradient else 4) * n * k * (1 / _BF16 - 1 / _FP8)
    along = _ONE_PASS if recipe.rows else _TWO_PASSES  # of x, w and dy, for y and dx
    cast = along * (n + k) + (_TWO_PASSES * (n + k) if recipe.weight_gradient else 0)
    weights = 0.0 if tokens is None else (along + _TWO_PASSES) * n * k / tokens
    return saved - (cast + weights) / _BANDWIDTH
