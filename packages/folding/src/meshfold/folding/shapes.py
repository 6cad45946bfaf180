"""Leading dims: blocks take any number of them (``*``) and compute with one, ``b``."""

from __future__ import annotations

import math

from torch import Size, Tensor


def flat(x: Tensor, dims: int) -> Tensor:
    """Flatten all dims but the last ``dims`` into one: ``* .. -> b ..``."""
    return x.reshape(-1, *x.shape[-dims:])


def flat_target(into: Tensor | None, dims: int) -> Tensor | None:
    """Return :func:`flat` of what an update is added to, as a view. Raises RuntimeError where it would be a copy."""
    return None if into is None else into.view(-1, *into.shape[-dims:])


def flat_mask(mask: Tensor | None, lead: Size, dims: int) -> Tensor | None:
    """Expand a mask to the leading dims ``lead`` and flatten them: ``b ..``."""
    if mask is None:
        return None
    tail = mask.shape[-dims:]
    return mask.expand(*lead, *tail).reshape(math.prod(lead), *tail)
