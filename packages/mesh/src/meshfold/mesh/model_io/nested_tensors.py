"""Tensors in nested arguments of operators, found without torch's registry of containers where plain ones are nested."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

_LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested values in order, as ``tree_iter`` finds them; one that is there twice comes twice."""
    found: list[Tensor] = []
    _find(values, found)
    return found


def _find(value: Any, found: list[Tensor]) -> None:
    kind = type(value)
    if kind is tuple or kind is list:
        for each in value:
            _find(each, found)
    elif kind is dict:
        for each in value.values():
            _find(each, found)
    elif isinstance(value, Tensor):
        found.append(value)
    elif kind not in _LEAVES:
        found += [each for each in tree_iter(value) if isinstance(each, Tensor)]
