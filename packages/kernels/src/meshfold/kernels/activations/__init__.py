"""Activations fused with their neighbours: SwiGLU and bias + GELU.

    swiglu      y = silu(gate) * up,  silu(v) = v * sigmoid(v)
    bias_gelu   y = gelu(x + bias),   exact (erf) or the tanh approximation

Computed in float32 (float64 for float64), rounded once at the output. The backward recomputes from the inputs and
keeps nothing else. Sources: Shazeer, "GLU Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian
Error Linear Units", 2016.
"""

from __future__ import annotations

from meshfold.kernels.activations.gated import swiglu, swiglu2
from meshfold.kernels.activations.gelu import bias_gelu

__all__ = ["bias_gelu", "swiglu", "swiglu2"]
