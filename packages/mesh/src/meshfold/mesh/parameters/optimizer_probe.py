"""A probe of what an optimizer reads when it steps a parameter: it is tried on two small matrices."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshfold.mesh.errors import MeshfoldError

Sight = Literal["elements", "matrices", "others"]
"""Each element alone; the whole parameter; other parameters too, or random numbers."""

_STEPS = 24  # some optimizers read the whole matrix only every few steps
_SHAPES = ((6, 5), (4, 3))
_CUT = 13  # in the middle of a row
_WIDTH = 1e-9  # tolerance: equal results differ only by the order of additions


class OptimizerProbeError(MeshfoldError):
    """An optimizer could not be tried out."""


def probe_optimizer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Sight:
    """Return what an optimizer reads: step on matrices together, each by itself, and in flat shards, and compare.

    Args:
        optimizer: with its settings; it is not changed and does not step. Random states are not changed.
        group: one of its groups.

    Raises:
        TrialError: if it cannot step on such matrices.
    """
    generator = torch.Generator().manual_seed(0)
    first, *gradients = (
        [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in _SHAPES] for _ in range(_STEPS + 1)
    )
    try:
        with torch.random.fork_rng(devices=[]):
            together, _ = _run(optimizer, group, first, gradients)
            alone = [_run(optimizer, group, [first[i]], [[g[i]] for g in gradients]) for i in range(len(first))]
    except Exception as error:
        raise OptimizerProbeError(
            f"{type(optimizer).__name__} is not known, and trying it out on two small matrices failed ({type(error).__name__}: "
            f"{error}): let its class say elementwise = True (each element is stepped on its own) or elementwise = False (it "
            "needs whole matrices)"
        ) from error
    if not _same(together, [weights[0] for weights, _ in alone]):
        return "others"
    if any(_looks_wider(state, weights.shape) for (weights,), states in alone for state in states):
        return "matrices"
    try:
        with torch.random.fork_rng(devices=[]):
            for i, start in enumerate(first):
                pieces = []
                for cut in (slice(None, _CUT), slice(_CUT, None)):
                    flat = [[g[i].flatten()[cut]] for g in gradients]
                    if flat[0][0].numel():
                        pieces.append(_run(optimizer, group, [start.flatten()[cut]], flat)[0][0])
                if not _same([torch.cat(pieces)], [together[i].flatten()]):
                    return "matrices"
    except Exception:  # it takes only matrices
        return "matrices"
    return "elements"


def number_keys(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the keys of an optimizer's state that hold one number a parameter, such as ``step``.

    It is tried out on a parameter of two elements, in a twin with the same settings. A scalar parameter's moments have
    the shape of a number as well, so that their shape does not tell.

    Raises:
        OptimizerProbeError: if it cannot step on such a parameter.
    """
    pair = torch.ones(2, dtype=torch.float64)
    found: set[str] = set()
    try:
        with torch.random.fork_rng(devices=[]):
            for group in optimizer.param_groups:
                _, (state,) = _run(optimizer, group, [pair], [[pair]])
                found |= {key for key, value in state.items() if isinstance(value, Tensor) and not value.dim()}
    except Exception as error:
        raise OptimizerProbeError(
            f"{type(optimizer).__name__} could not be tried out on a parameter of two elements ({type(error).__name__}: {error}), "
            "which shows what the saved state of a scalar parameter is: give that parameter the shape (1,)"
        ) from error
    return frozenset(found)


def _run(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Run some steps of an optimizer like the given one; return the values, and its state for each parameter."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    twin = _twin(optimizer, group, parameters)
    with torch.enable_grad():
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            twin.step()
    return [p.detach() for p in parameters], [dict(twin.state.get(p, {})) for p in parameters]


def _twin(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer with the same settings for other parameters."""
    own = {**group, "params": parameters}
    if optimizer.state:  # it creates state in its constructor
        return type(optimizer)([own], **optimizer.defaults)
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    # Replace the model's parameters by ours while copying attributes, so that none is copied.
    memo = {id(p): parameters[0] for g in optimizer.param_groups for p in g["params"]}
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            vars(twin)[key] = OrderedDict()
        elif key not in ("param_groups", "state", "step"):
            vars(twin)[key] = copy.deepcopy(value, memo)
    twin.state = defaultdict(dict)
    twin.param_groups = [own]
    return twin


def _same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=_WIDTH, atol=_WIDTH, equal_nan=True) for a, b in zip(found, wanted, strict=True)
    )


def _looks_wider(state: Mapping[str, Any], shape: torch.Size) -> bool:
    """Return True if a matrix's state has tensors of another shape than its own: then the optimizer is not elementwise."""
    return any(
        bool(value)
        if isinstance(value, list | tuple | dict)
        else isinstance(value, Tensor) and value.numel() > 1 and value.shape != shape
        for value in state.values()
    )
