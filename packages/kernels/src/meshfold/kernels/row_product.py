"""Products of one row with a weight, or with its codes: a Triton kernel on a GPU, where a library's product reads slower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def is_one_row(x: Tensor) -> bool:
    """Return True if an input is one row that the kernel takes."""
    return (
        x.is_cuda
        and x.numel() == x.shape[-1]
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and find_spec("triton") is not None
    )


def row_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None, zero: Tensor | None = None
) -> Tensor:
    """Multiply one row by a weight: ``.. k -> .. n``, in the dtype of ``x``; sums are in float32.

    Args:
        x: of k elements in all, on a GPU.
        weight: ``n k``, rows contiguous; or codes, as in :class:`meshfold.kernels.PackedWeight`.
        bias: ``n``, or None.
        scale, zero: of codes.
    """
    from meshfold.kernels.row_product_triton import product  # which needs Triton

    return product(x, weight, bias, scale, zero)


@contextmanager
def one_row_products(model: nn.Module) -> Iterator[None]:
    """Context manager: plain linear layers of a model on a GPU multiply one row by the kernel."""
    changed = [
        module
        for module in model.modules()
        if type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and isinstance(module._parameters.get("weight"), Tensor)
        and module.weight.is_cuda
        and module.weight.is_contiguous()  # type: ignore[operator]
    ]
    for module in changed:
        module.__dict__["forward"] = partial(_forward, cast(nn.Linear, module))
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    if is_one_row(x) and x.dtype == module.weight.dtype:
        return row_product(x, module.weight, module.bias)
    return F.linear(x, module.weight, module.bias)
