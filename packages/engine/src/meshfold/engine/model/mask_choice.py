"""Choice of the attention mask that a Hugging Face model makes in a training step, without waiting for the device.

Models of transformers read tensors to find out if they can leave a mask out: do ``position_ids`` restart at packed documents,
and does ``attention_mask`` hide anything? Each read waits for the device. While a CUDA graph is captured they make the mask
without a read, and attention takes a slower kernel. In a training step the first answer is known: positions that the batch does
not give are counted from 0 by the model itself.

The two functions of ``transformers.masking_utils`` that look are replaced once by functions that ask the context first;
outside the contexts below they are theirs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

_OWN_POSITIONS = ContextVar("own_positions", default=False)
_BY_SHAPE = ContextVar("by_shape", default=False)


def makes_masks(model: nn.Module) -> bool:
    """Return True for a model of transformers; its masks are chosen by the contexts of this module from then on.

    A class of somebody else may compute ``position_ids`` in its forward, so these are not known to be counted from 0.
    """
    utilities = sys.modules.get("transformers.masking_utils")
    theirs = [module for module in model.modules() if hasattr(type(module), "loss_function")]
    if utilities is None or not theirs or theirs[0] is not model:
        return False
    if any("forward" in vars(each) or not type(each).__module__.startswith("transformers.models.") for each in theirs):
        return False
    _replace(utilities, "find_packed_sequence_indices", _documents)
    _replace(utilities, "is_tracing", _is_tracing)
    return True


@contextmanager
def positions_of_the_model() -> Iterator[None]:
    """Context manager of a call without ``position_ids``: no documents are packed into the rows, so nothing is looked at."""
    token = _OWN_POSITIONS.set(True)
    try:
        yield
    finally:
        _OWN_POSITIONS.reset(token)


@contextmanager
def masks_by_shape() -> Iterator[None]:
    """Context manager in which a mask is left out only if no tensor needs a look, as on every replay of a CUDA graph."""
    token = _BY_SHAPE.set(True)
    try:
        yield
    finally:
        _BY_SHAPE.reset(token)


def _documents(theirs: Callable[[Tensor], Tensor | None], position_ids: Tensor) -> Tensor | None:
    if not torch.compiler.is_compiling() and _OWN_POSITIONS.get():
        return None
    return theirs(position_ids)


def _is_tracing(theirs: Callable[..., bool], tensor: Any = None) -> bool:
    if not torch.compiler.is_compiling() and _BY_SHAPE.get():
        return tensor is not None
    return theirs(tensor)


def _replace(utilities: Any, name: str, ours: Callable[..., Any]) -> None:
    theirs = getattr(utilities, name, None)  # other versions may not have it
    if theirs is not None and getattr(theirs, "func", None) is not ours:
        setattr(utilities, name, functools.partial(ours, theirs))
