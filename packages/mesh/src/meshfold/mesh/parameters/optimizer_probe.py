"""A probe of what an optimizer reads when it steps a parameter: it is tried on two small matrices."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

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


class StateLayout(NamedTuple):
    """The state that an optimizer keeps for a parameter of which it has a flat shard.

    Attributes:
        like: dtype of each tensor that has one number an element, by key.
        others: keys of what is neither that nor a single number.
        changed: the optimizer's own attributes that a step changes.
        settings: of its groups, those that a step changes.
        draws: it draws random numbers.
    """

    like: dict[str, torch.dtype]
    others: tuple[str, ...]
    changed: tuple[str, ...]
    settings: tuple[str, ...] = ()
    draws: bool = False

    @property
    def steps_one_by_one(self) -> bool:
        """True if parameters can be stepped at different times, each once: a step changes nothing but their state."""
        return not (self.others or self.changed or self.settings or self.draws)


def state_layout(optimizer: torch.optim.Optimizer, dtype: torch.dtype, *, with_state: bool = False) -> StateLayout:
    """Return what an optimizer keeps for a parameter, of all its groups together: a twin steps on three elements.

    Args:
        optimizer: with its settings; it is not changed and does not step.
        dtype: of the parameter.
        with_state: it makes its state at construction.

    Raises:
        OptimizerProbeError: if it cannot step on such a parameter.
    """
    like: dict[str, torch.dtype] = {}
    others: list[str] = []
    changed: list[str] = []
    settings: list[str] = []
    draws = False
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            for group in optimizer.param_groups:
                parameter = nn.Parameter(torch.ones(3, dtype=dtype))
                twin = twin_of(optimizer, group, [parameter], with_state=with_state)
                before = {key: copy.deepcopy(value, {id(parameter): parameter}) for key, value in _own(twin).items()}
                given, seed = copy.deepcopy(_settings(twin)), torch.random.get_rng_state()
                for _ in range(_STEPS):
                    parameter.grad = torch.ones_like(parameter)
                    twin.step()
                changed += [key for key, value in _own(twin).items() if not _is_same(value, before.get(key))]
                settings += [key for key, value in _settings(twin).items() if not _is_same(value, given.get(key))]
                draws |= not torch.equal(seed, torch.random.get_rng_state())
                for key, value in twin.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        like[key] = value.dtype
                    elif isinstance(value, list | tuple | dict) or (isinstance(value, Tensor) and value.numel() > 1):
                        others.append(key)
    except Exception as error:
        raise OptimizerProbeError(
            f"{type(optimizer).__name__} could not be tried out on a parameter of three elements ({type(error).__name__}: "
            f"{error}), which shows what it keeps"
        ) from error
    return StateLayout(like, _once(others), _once(changed), _once(settings), draws)


def _once(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's own attributes, without those that torch keeps."""
    torchs = ("param_groups", "state", "step", "defaults", "_opt_called")
    return {key: value for key, value in vars(optimizer).items() if key not in torchs and not key.endswith("_hooks")}


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer's one group."""
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def _is_same(value: Any, before: Any) -> bool:
    """Return True if an attribute is what its copy from before the steps is."""
    if value is before:
        return True
    if isinstance(value, Tensor) and isinstance(before, Tensor):
        return torch.equal(value, before)
    kind: Any = type(value)
    try:
        # Objects that compare by identity are copied, so only their attributes tell.
        if kind.__eq__ is object.__eq__ and hasattr(value, "__dict__"):
            return bool(vars(value).keys() == vars(before).keys()) and all(
                _is_same(one, vars(before)[key]) for key, one in vars(value).items()
            )
        return bool(value == before)
    except Exception:  # tensors inside, which do not compare
        return False


def _run(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Run some steps of an optimizer like the given one; return the values, and its state for each parameter."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    twin = twin_of(optimizer, group, parameters)
    with torch.enable_grad():
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            twin.step()
    return [p.detach() for p in parameters], [dict(twin.state.get(p, {})) for p in parameters]


def twin_of(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameters: list[nn.Parameter],
    *,
    with_state: bool | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer with the same settings for other parameters; ``with_state``: its constructor makes state, None: if
    it has some."""
    own = {**group, "params": parameters}
    if bool(optimizer.state) if with_state is None else with_state:
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
