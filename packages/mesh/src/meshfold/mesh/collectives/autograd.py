"""Results of the forward of a :class:`torch.autograd.Function` that torch.compile and in-place operations can take."""

from __future__ import annotations

import torch
from torch import Tensor


def traceable_result(y: Tensor) -> Tensor:
    """Return ``y`` for a forward to return: itself, and in a traced graph a separate tensor in y's memory.

    Torch 2.11 gives the graph of a forward every tensor on the way as a further result. Where an operator returned its
    operand (``x.to(x.dtype)``, ``x.contiguous()``, ``x.add_(..)``, waiting for a collective), two of them are one and
    the same tensor, autograd ties it to the last, and the gradient of the first, which the model has, is zero without
    a word. A forward that returns what other code gave it, which may have done so, returns it through here.
    ``detach`` and not a view: what becomes of a view in place autograd refuses.
    """
    return y.detach() if torch.compiler.is_compiling() else y


def non_view_result(y: Tensor, x: Tensor) -> Tensor:
    """:func:`traceable_result`, and no view: autograd forbids in-place changes of a view that a Function returns.

    So ``nn.ReLU(inplace=True)`` and ``y += x`` work behind a sharded layer as behind torch's own.

    Args:
        y: what the forward computed.
        x: its input; of a part of it a copy is returned, which may be changed without changing the input.
    """
    if torch.compiler.is_compiling() or not y._is_view():
        return traceable_result(y)
    if y._base is (x._base if x._is_view() else x):
        return y.clone()
    # Nobody else has the tensor that y is a view of.
    found: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
    return found
