"""RMSNorm modules of any name: ``x / sqrt(mean(x**2) + eps) * weight``, or ``* (1 + weight)`` as in Gemma."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshfold.kernels.fuse.replaced import ReplacedForward, candidates, own_forward, runs_fused
from meshfold.kernels.inputs import is_autocast
from meshfold.kernels.norms import rms_norm

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")


def fuse_norms(model: nn.Module, *, always: bool) -> list[ReplacedForward]:
    """Let every RMSNorm of a model run as one kernel; see :func:`meshfold.kernels.fuse.fuse`."""
    tried: dict[Any, float | None] = {}
    found = []
    for name, module in candidates(model):
        eps = _eps(module)
        if eps is None:
            continue
        kind = (type(module), module.get_parameter("weight").shape, eps)
        if kind not in tried:
            tried[kind] = _offset(module, eps)
        offset = tried[kind]
        if offset is not None:
            found.append(ReplacedForward(name, module, partial(_forward, module, eps, offset, always)))
    return found


def _forward(module: nn.Module, eps: float, offset: float, always: bool, x: Tensor) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    # Another dtype than the weight's: the module's own code says what the result's is.
    if x.dtype != weight.dtype or not runs_fused(x, always) or is_autocast(x):
        result: Tensor = type(module).forward(module, x)
        return result
    return rms_norm(x, weight.float() + offset if offset else weight, eps)


def _eps(module: nn.Module) -> float | None:
    """Return the eps of a module that may be an RMSNorm: a leaf with a vector of weights and nothing else."""
    if type(module).__module__.startswith("meshfold.") or not own_forward(module):
        return None
    parameters = dict(module.named_parameters(recurse=False))
    if list(parameters) != ["weight"] or parameters["weight"].ndim != 1 or any(module.buffers()):
        return None
    if next(module.children(), None) is not None:
        return None
    return next((e for name in _EPS if isinstance(e := getattr(module, name, None), float)), None)


@torch.no_grad()
def _offset(module: nn.Module, eps: float) -> float | None:
    """Return what a module adds to its weight if it is an RMSNorm, found by trial; None if it is none."""
    random = torch.Generator().manual_seed(0)
    hidden = module.get_parameter("weight").shape[0]
    weight = torch.rand(hidden, generator=random) + 0.5
    # Rows about as small as sqrt(eps), where eps counts, and large ones, off centre.
    x = torch.randn(2, 3, hidden, generator=random) + 0.5
    x[0] *= eps**0.5
    try:
        y = functional_call(module, {"weight": weight}, (x,))
    except Exception:  # it takes something else: no norm of rows
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return None
    for offset in (0.0, 1.0):
        if torch.allclose(y, rms_norm(x, weight + offset, eps), rtol=1e-5, atol=1e-6):
            return offset
    return None
