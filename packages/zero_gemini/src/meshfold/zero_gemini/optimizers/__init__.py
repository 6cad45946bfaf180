"""Adam for plain tensors, with the kernels that step chunks: on the CPU by numba, on a GPU by Triton."""

from __future__ import annotations

from meshfold.zero_gemini.optimizers.adam import CPUAdam, FlatAdam, HybridAdam

__all__ = ["CPUAdam", "FlatAdam", "HybridAdam"]
