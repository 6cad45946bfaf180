"""Upcycling: a mixture of experts from a trained dense model, each expert a copy of its feed-forward.

If the weights of a softmax router sum to one, the new model computes what the dense one did, up to rounding, until training makes
the experts differ. Source: Komatsuzaki et al., "Sparse Upcycling", 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from meshfold.experts.layer import MixtureOfExperts
from meshfold.experts.routers import SoftmaxRouter
from meshfold.kernels import swiglu
from meshfold.mesh import SpecError

_TOKENS, _HIDDEN, _FFN = 5, 8, 12


@dataclass(frozen=True, kw_only=True)
class _Dense:
    """A gated SiLU feed-forward: the names of its weights. ``gate_up`` is one matrix of both, or two."""

    gate_up: tuple[str, ...]
    down: str


def upcycle(
    model: nn.Module,
    experts: int,
    top_k: int,
    *,
    where: Callable[[str], bool] | None = None,
    capacity: float | None = None,
) -> list[str]:
    """Replace the gated SiLU feed-forwards of a model by mixtures whose experts are copies of them, in place.

    Args:
        model: trained; its feed-forwards have gate, up and down projections without biases, as Llama's, Qwen's and Mistral's.
        experts: of each mixture.
        top_k: experts a token; weights are divided by their sum, so the output does not change.
        where: is given the name of each feed-forward; True if it is to be replaced. None: all are.
        capacity: see :func:`meshfold.experts.dispatch`.

    Returns:
        the names of the replaced modules.

    Raises:
        SpecError: if there is no such feed-forward, or top_k does not fit.
    """
    found = [
        (name, module, dense)
        for name, module in model.named_modules()
        if name and (where is None or where(name)) and (dense := _dense(module)) is not None
    ]
    if not found:
        raise SpecError(
            "no gated feed-forward to upcycle: a module with linear layers gate, up and down (or both of the first in one), "
            "without biases, that computes down(silu(gate(x)) * up(x)); check `where`"
        )
    for name, module, dense in found:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _mixture(module, dense, experts, top_k, capacity))
    return [name for name, _, _ in found]


@torch.no_grad()
def _mixture(module: nn.Module, dense: _Dense, experts: int, top_k: int, capacity: float | None) -> MixtureOfExperts:
    gate_up = torch.cat([module.get_parameter(name) for name in dense.gate_up])
    down = module.get_parameter(dense.down)
    hidden, ffn = down.shape
    router = SoftmaxRouter(hidden, experts, top_k, normalize=True)
    made = MixtureOfExperts(hidden, ffn, experts, top_k, router=router, capacity=capacity).to(down.device, down.dtype)
    made.experts.gate_up.copy_(gate_up.expand(experts, -1, -1))
    made.experts.down.copy_(down.expand(experts, -1, -1))
    return made.train(module.training)


def _dense(module: nn.Module) -> _Dense | None:
    """Return the weights of a gated feed-forward; None for another module. A trial on small numbers decides."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if len(shapes) not in (2, 3) or any(len(shape) != 2 or name.count(".") != 1 for name, shape in shapes.items()):
        return None
    for down, (hidden, ffn) in shapes.items():
        others = tuple(name for name in shapes if name != down)
        orders = (others,) if len(others) == 1 else (others, others[::-1])
        if any(shapes[name] != (2 * ffn if len(others) == 1 else ffn, hidden) for name in others):
            continue
        for gate_up in orders:
            guess = _Dense(gate_up=gate_up, down=down)
            if _agrees(module, guess):
                return guess
    return None


@torch.no_grad()
def _agrees(module: nn.Module, guess: _Dense) -> bool:
    random = torch.Generator().manual_seed(0)
    both = torch.randn(2 * _FFN, _HIDDEN, generator=random)
    down = torch.randn(_HIDDEN, _FFN, generator=random)
    values: dict[str, Tensor] = {guess.down: down}
    values |= dict(zip(guess.gate_up, both.chunk(len(guess.gate_up)), strict=True))
    x = torch.randn(_TOKENS, _HIDDEN, generator=random)
    try:
        y = functional_call(module, values, (x,))
    except Exception:  # takes other arguments: not a feed-forward
        return False
    expected = F.linear(swiglu(F.linear(x, both)), down)
    return isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, expected, rtol=1e-4, atol=1e-4)
