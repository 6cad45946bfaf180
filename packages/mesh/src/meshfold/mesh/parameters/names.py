"""Names of parameters, buffers and modules as they are without ``torch.compile``, whoever has compiled which module."""

from __future__ import annotations

_WRAPPED = "_orig_mod"  # how torch.compile(module) names the module in the one it makes


def uncompiled_name(name: str) -> str:
    """A name in the model that was written.

    >>> plain("blocks.0._orig_mod.up.weight")
    'blocks.0.up.weight'
    """
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _WRAPPED in name else name
