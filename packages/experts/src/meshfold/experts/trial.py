"""Trial of a module on small random numbers: is it stacked experts, and how are its parameters laid out?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from meshfold.experts.dispatch import dispatch
from meshfold.experts.feed_forward import ExpertLayout, Gate, feed_forward
from meshfold.kernels import swiglu

_HIDDEN, _FFN, _TOKENS, _TOP_K = 8, 12, 5, 2


def layout_of(experts: nn.Module) -> ExpertLayout | None:
    """Return the layout of the parameters of stacked experts; None for any other module.

    The module itself, not its children, must have two tensors ``[e, ., .]`` and at most two ``[e, .]``. It must take (tokens [n,
    h], expert numbers [n, k], weights [n, k]) and return the weighted sum of gated feed-forwards, which a trial checks.
    """
    parameters = dict(experts.named_parameters(recurse=False))
    if any(True for child in experts.children() for _ in child.parameters()) or any(True for _ in experts.buffers()):
        return None
    matrices = [name for name, p in parameters.items() if p.dim() == 3]
    vectors = [name for name, p in parameters.items() if p.dim() == 2]
    if len(matrices) != 2 or len(matrices) + len(vectors) != len(parameters) or len(vectors) not in (0, 2):
        return None
    if len({p.shape[0] for p in parameters.values()}) != 1:
        return None
    return next((layout for layout in _guesses(experts, matrices, vectors) if _agrees(experts, layout)), None)


def _guesses(experts: nn.Module, matrices: list[str], vectors: list[str]) -> Iterator[ExpertLayout]:
    shapes = {name: experts.get_parameter(name).shape[1:] for name in (*matrices, *vectors)}
    for gate_up, down in permutations(matrices):
        for transposed in (False, True):
            inner, hidden = shapes[gate_up][::-1] if transposed else shapes[gate_up]
            if shapes[down][:: -1 if transposed else 1] != (hidden, inner // 2) or inner % 2:
                continue
            for pair in permutations(vectors) if vectors else [(None, None)]:
                gate_up_bias, down_bias = pair
                if vectors and (shapes[gate_up_bias] != (inner,) or shapes[down_bias] != (hidden,)):  # type: ignore[index]
                    continue
                for gate in _gates(experts):
                    yield ExpertLayout(
                        gate_up=gate_up,
                        down=down,
                        gate_up_bias=gate_up_bias,
                        down_bias=down_bias,
                        transposed=transposed,
                        interleaved=_interleaves(gate),
                        gate=gate,
                    )


@torch.no_grad()
def _interleaves(gate: Gate) -> bool:
    """Return True if gate and up take turns: the first half of the input then makes the first half of the output."""
    both = torch.linspace(-2.0, 2.0, 8).unsqueeze(0)
    return torch.equal(gate(both[:, :4]), gate(both)[:, :2])


def _gates(experts: nn.Module) -> Iterator[Gate]:
    """Yield activations that a module may have: a kernel's, its own, and two that are common."""
    yield swiglu
    own = getattr(experts, "_apply_gate", None)
    if callable(own):
        yield own
    yield _geglu
    yield _geglu_tanh


def _geglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate) * up


def _geglu_tanh(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


class _Eager(nn.Module):
    """Calls a module's own code, without decorators that may choose another implementation."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts
        self._forward: Callable[..., Any] = inspect.unwrap(type(experts).forward)

    def forward(self, *arguments: Tensor) -> Any:
        return self._forward(self.experts, *arguments)


@torch.no_grad()
def _agrees(experts: nn.Module, layout: ExpertLayout) -> bool:
    """Return True if a module, given small parameters, computes the result of a layout."""
    random = torch.Generator().manual_seed(0)
    number = experts.get_parameter(layout.down).shape[0]
    shapes: dict[str, tuple[int, ...]] = {layout.gate_up: (2 * _FFN, _HIDDEN), layout.down: (_HIDDEN, _FFN)}
    if layout.transposed:
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    for name, size in ((layout.gate_up_bias, 2 * _FFN), (layout.down_bias, _HIDDEN)):
        if name is not None:
            shapes[name] = (size,)
    small = {name: torch.randn(number, *shape, generator=random) for name, shape in shapes.items()}
    x = torch.randn(_TOKENS, _HIDDEN, generator=random)
    each = min(_TOP_K, number)
    index = torch.stack([torch.randperm(number, generator=random)[:each] for _ in range(_TOKENS)])
    weights = torch.rand(_TOKENS, each, generator=random)
    stand_in = nn.Module()
    for name, value in small.items():
        stand_in.register_parameter(name, nn.Parameter(value, requires_grad=False))
    try:
        found = functional_call(
            _Eager(experts), {f"experts.{name}": value for name, value in small.items()}, (x, index, weights)
        )
        mine = dispatch(
            x,
            index,
            weights,
            lambda rows: feed_forward(layout, stand_in, rows),
            experts=number,
        )
    except Exception:  # takes other arguments: not experts
        return False
    return isinstance(found, Tensor) and found.shape == x.shape and torch.allclose(found, mine, rtol=1e-4, atol=1e-4)
