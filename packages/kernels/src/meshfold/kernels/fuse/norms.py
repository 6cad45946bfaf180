"""RMSNorm and LayerNorm modules of any name, found by trial::

RMSNorm    x / sqrt(mean(x**2) + eps) * weight, or * (1 + weight) as in Gemma
LayerNorm  (x - mean) / sqrt(mean((x - mean)**2) + eps) * weight, or * (1 + weight); with a bias or without
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshfold.kernels.fp8_inputs import FP8_SOURCE, Fp8Source
from meshfold.kernels.fuse.replaced import ReplacedForward, candidates, own_forward, runs_fused, settings_of
from meshfold.kernels.inputs import is_autocast
from meshfold.kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The norm that a module computes.

    Attributes:
        centred: LayerNorm; else RMSNorm.
        eps: of the norm.
        offset: added to the weight.
        weight: the weight's name in the module.
        bias: the bias's name; empty without one.
        enter: what the module does with its weight and its bias first, such as summing their gradients over ranks; None: nothing.
    """

    centred: bool
    eps: float
    offset: float
    weight: str
    bias: str
    enter: Callable[[Tensor], Tensor] | None = None

    def of(self, x: Tensor, parameters: Mapping[str, Tensor], source: Fp8Source | None = None) -> Tensor:
        """Return the norm of every row, with a module's parameters by name; ``source``: the module's."""
        weight, bias = self._parameters(parameters)
        if self.centred:
            return layer_norm(x, weight, bias, self.eps, source=source)
        return rms_norm(x, weight, self.eps, source=source)

    def of_sum(
        self, x: Tensor, residual: Tensor, parameters: Mapping[str, Tensor], source: Fp8Source | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of ``x + residual``, and that sum."""
        weight, bias = self._parameters(parameters)
        if self.centred:
            return add_layer_norm(x, residual, weight, bias, self.eps, source=source)
        return add_rms_norm(x, residual, weight, self.eps, source=source)

    def takes(self, x: Tensor, parameters: Mapping[str, Tensor | None]) -> bool:
        """Return True for a tensor in the dtype of the parameters: in another dtype the module's own code decides the result's."""
        weight, bias = parameters[self.weight], parameters[self.bias] if self.bias else None
        if weight is None or weight.dtype != x.dtype or (self.bias and (bias is None or bias.dtype != x.dtype)):
            return False
        return not is_autocast(x)

    def _parameters(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        weight, bias = parameters[self.weight], parameters[self.bias] if self.bias else None
        if self.enter is not None:
            weight, bias = self.enter(weight), None if bias is None else self.enter(bias)
        if self.offset:  # at least in float32
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + self.offset
        return weight, bias


@runtime_checkable
class OffersNorm(Protocol):
    """Protocol of a norm that runs as its own kernel, or together with a sum under the rule ``residual``."""

    def fused_norm(self) -> Norm | None:
        """Return the norm that the module computes of whole rows; None if a kernel cannot make the sum for it."""


def offered_norms(model: nn.Module) -> dict[nn.Module, Norm]:
    """Return the modules of a model for the rule ``residual``, without modules of another rank's pipeline stage."""
    offers = ((module, module.fused_norm()) for _, module in candidates(model) if isinstance(module, OffersNorm))
    return {
        module: norm
        for module, norm in offers
        if norm is not None and isinstance(getattr(module, norm.weight, None), nn.Parameter)
    }


def fuse_norms(model: nn.Module, *, always: bool) -> list[ReplacedForward]:
    """Let every norm of a model run as one kernel; see :func:`meshfold.kernels.fuse.fuse`."""
    return [
        ReplacedForward(name, module, partial(_forward, module, norm, always))
        for name, module, norm in find_norms(model)
    ]


def find_norms(model: nn.Module) -> list[tuple[str, nn.Module, Norm]]:
    """Return the norms of a model that run through the forward of their class, with their names."""
    tried: dict[Any, Norm | None] = {}
    found = []
    for name, module in candidates(model):
        shapes = _shapes(module)
        epsilons = _epsilons(module) if shapes else ()
        if not epsilons:
            continue
        kind = (settings_of(module), tuple(shapes.items()), epsilons)
        if kind not in tried:
            tried[kind] = _trial(module, list(shapes), epsilons)
        if (norm := tried[kind]) is not None:
            found.append((name, module, norm))
    return found


def runs_norm(module: nn.Module) -> bool:
    """Return True if a call of a norm runs its class's forward or the kernel of :func:`fuse_norms`, no other replacement."""
    forward = module.__dict__.get("forward")
    return forward is None or (isinstance(forward, partial) and forward.func is _forward)


def _forward(module: nn.Module, norm: Norm, always: bool, *args: Any, **kwargs: Any) -> Tensor:
    parameters: Any = module._parameters
    # Called with more, it may compute something else, as a norm that also takes a gate does.
    if kwargs or len(args) != 1 or not runs_fused(args[0], always) or not norm.takes(args[0], parameters):
        result: Tensor = type(module).forward(module, *args, **kwargs)
        return result
    return norm.of(args[0], parameters, module.__dict__.get(FP8_SOURCE))


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Return the parameter shapes of a possible norm, a leaf with one or two vectors of equal size; else an empty result."""
    if type(module).__module__.startswith("meshfold.") or not own_forward(module):
        return {}
    if next(module.children(), None) is not None or any(True for _ in module.buffers()):
        return {}
    shapes = {name: p.shape for name, p in module.named_parameters(recurse=False)}
    alike = len(shapes) in (1, 2) and len(set(shapes.values())) == 1 and len(next(iter(shapes.values()))) == 1
    return shapes if alike else {}


def _epsilons(module: nn.Module) -> tuple[float, ...]:
    """Return the numbers of a module that may be its eps, the usual names first."""
    named = [getattr(module, name, None) for name in _EPS]
    others = [value for name, value in vars(module).items() if name not in _EPS]
    return tuple(dict.fromkeys(e for e in named + others if isinstance(e, float) and 0.0 < e < 0.1))


@torch.no_grad()
def _trial(module: nn.Module, names: list[str], epsilons: tuple[float, ...]) -> Norm | None:
    """Return the norm that a module computes, found by trial; None if it computes none."""
    random = torch.Generator().manual_seed(0)
    hidden = module.get_parameter(names[0]).shape[0]
    parameters = {name: torch.rand(hidden, generator=random) + 0.5 for name in names}
    # Rows near sqrt(eps), where eps matters, and large rows with a mean.
    x = torch.randn(2, 3, hidden, generator=random) + 0.5
    x[0] *= epsilons[0] ** 0.5
    try:
        y = functional_call(module, parameters, (x,))
    except Exception:  # takes other arguments: not a norm
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return None
    for eps in epsilons:
        for weight, bias in permutations(names) if len(names) == 2 else ((names[0], ""),):
            for centred, offset in product((True,) if bias else (False, True), (0.0, 1.0)):
                norm = Norm(centred=centred, eps=eps, offset=offset, weight=weight, bias=bias)
                if torch.allclose(y, norm.of(x, parameters), rtol=1e-5, atol=1e-6):
                    return norm
    return None
