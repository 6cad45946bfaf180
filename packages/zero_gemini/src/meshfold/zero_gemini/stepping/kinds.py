"""What an optimizer needs to see of a parameter: its elements alone, or the whole of it.

Known ones are looked up, those that declare it are believed, and others are tried out on a few numbers.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.optimizers import FlatAdam
from meshfold.zero_gemini.stepping.adam import suits

Kind = Literal["adam", "elementwise", "matrices"]
"""Carried out by our kernels; stepped on shards; stepped on whole parameters."""

_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
_MATRICES = ("Adafactor", "Muon")
_FLOAT32 = ((torch.float32, torch.float32),)


def kind_of(
    optimizer: torch.optim.Optimizer, dtypes: Iterable[tuple[torch.dtype, torch.dtype]] = _FLOAT32
) -> Kind:
    """How an optimizer is carried out on chunks.

    ``optimizer.elementwise``, True or False, is believed. Without it, an optimizer that is not of torch steps on two
    small random matrices: whole, each by itself, and in flat pieces. If pieces come out as the whole it is
    ``"elementwise"``; if only each matrix by itself does, ``"matrices"``.

    Args:
        optimizer: with its groups; it is not changed and does not step.
        dtypes: of the chunks, (the model's, that of true weights).

    Raises:
        MemoryPlanError: for one that cannot be carried out on chunks.
    """
    pairs = list(dtypes)
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MemoryPlanError(
            "LBFGS needs all gradients in one vector and the loss several times a step, and with ZeRO a rank sees its shards "
            "once: use adamw, or train without zero"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise MemoryPlanError(
            "SparseAdam steps on sparse gradients, and shards are dense: use adamw with embeddings of sparse=False"
        )
    if isinstance(optimizer, FlatAdam):
        return _of_ours(optimizer, pairs)
    if all(suits(optimizer, dtype, true) for dtype, true in pairs):
        return "adam"
    if type(optimizer) in _of_torch(_ELEMENTWISE):
        return "elementwise"
    if type(optimizer) in _of_torch(_MATRICES):
        return "matrices"
    declared = getattr(optimizer, "elementwise", None)
    if declared is not None:
        if not isinstance(declared, bool):
            raise MemoryPlanError(
                f"{name}.elementwise is {declared!r}; it is True (steps on each element alone) or False (needs whole "
                "parameters)"
            )
        return "elementwise" if declared else "matrices"
    kinds = {_tried(optimizer, group) for group in optimizer.param_groups}
    return "matrices" if "matrices" in kinds else "elementwise"


def adam_regime(optimizer: torch.optim.Optimizer, regime: str, seed: int) -> tuple[str, int]:
    """Regime and seed for an optimizer of kind ``"adam"``: those of HybridAdam and CPUAdam, unless Gemini was told others.

    Raises:
        MemoryPlanError: if both say a regime, and not the same; or groups have several.
    """
    if not isinstance(optimizer, FlatAdam):
        return regime, seed
    own = sorted({group["regime"] for group in optimizer.param_groups})
    if len(own) > 1:
        raise MemoryPlanError(
            f"the groups of {type(optimizer).__name__} have regimes {' and '.join(own)}: with chunks all have one"
        )
    if regime not in ("A", own[0]):
        raise MemoryPlanError(
            f"regime={regime!r} was asked for, and {type(optimizer).__name__} was made with regime={own[0]!r}: say it in one "
            "place"
        )
    return own[0], int(optimizer.param_groups[0]["seed"]) or seed


def _of_torch(names: Sequence[str]) -> set[type]:
    return {getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)}


def _of_ours(optimizer: FlatAdam, pairs: Sequence[tuple[torch.dtype, torch.dtype]]) -> Kind:
    for dtype, true in pairs:
        if true != torch.float32:
            raise MemoryPlanError(
                f"{type(optimizer).__name__} keeps true weights in float32, and this model (in {dtype}) has them in {true}: use "
                "torch.optim.AdamW, or precision='bf16', 'fp16' or 'fp32'"
            )
    if all(group["bias_correction"] for group in optimizer.param_groups):
        return "adam"
    if any(group["regime"] != "A" for group in optimizer.param_groups):
        raise MemoryPlanError(
            f"{type(optimizer).__name__} has bias_correction=False and a regime other than 'A'; on chunks those come with bias "
            "correction: leave one of them out"
        )
    return "elementwise"


# -- trying out -------------------------------------------------------------------------------------------------

_STEPS = 24  # some look at the whole matrix only every few steps
_SHAPES = ((6, 5), (4, 3))
_CUT = 13  # in the middle of a row
_WIDTH = 1e-9  # how far apart the same may be: they differ by the order of some additions at most


def _tried(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Kind:
    generator = torch.Generator().manual_seed(0)
    first, *gradients = (
        [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in _SHAPES]
        for _ in range(_STEPS + 1)
    )
    name = type(optimizer).__name__
    try:
        with torch.random.fork_rng(devices=[]):
            together, _ = _run(optimizer, group, first, gradients)
            alone = [
                _run(optimizer, group, [first[i]], [[g[i]] for g in gradients]) for i in range(len(first))
            ]
    except Exception as error:
        raise MemoryPlanError(
            f"{name} is not known, and trying it out on two small matrices failed ({type(error).__name__}: {error}): let its "
            "class say elementwise = True (each element is stepped on its own) or elementwise = False (it needs whole matrices)"
        ) from error
    if not _same(together, [weights[0] for weights, _ in alone]):
        raise MemoryPlanError(
            f"{name} steps on a parameter in a way that depends on others (or on chance), and with ZeRO no rank has them all: "
            "if only clipping by a global norm does that, use the engine's clip_grad_norm; if it draws random numbers for each "
            "element, let its class say elementwise = True"
        )
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
    except Exception:  # it takes matrices alone
        return "matrices"
    return "elementwise"


def _run(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """What becomes of values in some steps of an optimizer like the one given, and the state it then has of each."""
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
    """An optimizer with the same settings as a given one, for other parameters."""
    own = {**group, "params": parameters}
    if optimizer.state:  # it makes state when it is made
        return type(optimizer)([own], **optimizer.defaults)
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    # Its copied attributes must not copy the model's parameters; those it holds are replaced by ours.
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
        torch.allclose(a, b, rtol=_WIDTH, atol=_WIDTH, equal_nan=True)
        for a, b in zip(found, wanted, strict=True)
    )


def _looks_wider(state: Mapping[str, Any], shape: torch.Size) -> bool:
    """Whether something in a matrix's state is neither of its shape nor a number: then it is not for each element."""
    return any(
        bool(value)
        if isinstance(value, list | tuple | dict)
        else isinstance(value, Tensor) and value.numel() > 1 and value.shape != shape
        for value in state.values()
    )
