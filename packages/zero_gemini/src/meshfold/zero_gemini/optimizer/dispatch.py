"""Choice of how an optimizer runs on chunks: our kernels, on shards, or on whole parameters.

Known optimizers are looked up, declarations are trusted, and other optimizers are tried on small random matrices.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from meshfold.mesh.parameters import OptimizerProbeError, probe_optimizer, state_layout
from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.optimizer.adam import suits
from meshfold.zero_gemini.optimizers import FlatAdam

OptimizerKind = Literal["adam", "elementwise", "norms", "matrices"]
"""Run by our kernels; stepped on shards; on shards with norms of whole tensors; stepped on whole parameters."""

_ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
)
_MATRICES = ("Adafactor", "Muon")
_FLOAT32 = ((torch.float32, torch.float32),)


def optimizer_kind(
    optimizer: torch.optim.Optimizer, dtypes: Iterable[tuple[torch.dtype, torch.dtype]] = _FLOAT32
) -> OptimizerKind:
    """Return how an optimizer runs on chunks.

    ``optimizer.sight == "norms"`` is trusted: it gets norms over all ranks, see
    :class:`meshfold.mesh.parameters.ShardedSquareSums`. ``optimizer.elementwise``, True or False, is trusted. Without it,
    an optimizer that is not of torch steps on two small random matrices: whole, each by itself, and in flat pieces. If
    pieces give the same result as the whole it is ``"elementwise"``; if only each matrix by itself does, ``"matrices"``.

    Args:
        optimizer: with its groups; it is not changed and does not step.
        dtypes: of the chunks, (the model's, that of master weights).

    Raises:
        MemoryPlanError: for one that cannot run on chunks.
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
    if getattr(optimizer, "sight", None) == "norms":
        return "norms"
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


class StateSize(NamedTuple):
    """Size of an optimizer's state as a plan counts it; arguments of :meth:`Regime.of <meshfold.zero_gemini.planner.Regime.of>`.

    Attributes:
        moments: numbers an element, each as wide as the master weight.
        ours: it is Adam, which our kernels step.
        disk_reads: times that a step reads state on disk.
    """

    moments: float = 2
    ours: bool = True
    disk_reads: int = 1


def state_size(optimizer: torch.optim.Optimizer, dtype: torch.dtype, master_dtype: torch.dtype) -> StateSize:
    """Return the size of an optimizer's state: it is tried out, unless it is Adam. For matrices two numbers are assumed;
    :func:`~meshfold.zero_gemini.optimizer.owned_state.owned_state_size` counts them.

    Args:
        optimizer: with its groups; it is not changed and does not step.
        dtype: that the model computes in.
        master_dtype: of the master weights.

    Raises:
        MemoryPlanError: for one that cannot run on chunks.
    """
    kind = optimizer_kind(optimizer, [(dtype, master_dtype)])
    if kind == "adam":
        return StateSize()
    if kind == "matrices":
        return StateSize(ours=False)
    try:
        like = state_layout(optimizer, master_dtype, with_state=bool(optimizer.state)).like
    except OptimizerProbeError:
        return StateSize(ours=False)
    moments = sum(one.itemsize for one in like.values()) / master_dtype.itemsize
    return StateSize(moments, ours=False, disk_reads=2 if kind == "norms" else 1)


def steps_early(optimizer: torch.optim.Optimizer, dtype: torch.dtype, master_dtype: torch.dtype, *, disk: bool) -> bool:
    """Return True if an optimizer can step each chunk once its gradient is complete; if not, all gradients are held.

    Args:
        optimizer: with its groups; it is not changed and does not step.
        dtype: that the model computes in.
        master_dtype: of the master weights.
        disk: a folder is given for state on disk; without it only Adam steps chunk by chunk.

    Raises:
        MemoryPlanError: for one that cannot run on chunks.
    """
    kind = optimizer_kind(optimizer, [(dtype, master_dtype)])
    if kind != "elementwise" or not disk:
        return kind == "adam"
    try:
        return state_layout(optimizer, master_dtype, with_state=bool(optimizer.state)).steps_one_by_one
    except OptimizerProbeError:
        return False


def adam_regime(optimizer: torch.optim.Optimizer, regime: str, seed: int) -> tuple[str, int]:
    """Return regime and seed for an optimizer of kind ``"adam"``: HybridAdam's and CPUAdam's own, unless Gemini was given others.

    Raises:
        MemoryPlanError: if both set a regime, and not the same one; or if groups differ.
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
            f"regime={regime!r} was asked for, and {type(optimizer).__name__} was made with regime={own[0]!r}: give it in one "
            "place only"
        )
    return own[0], int(optimizer.param_groups[0]["seed"]) or seed


def _of_torch(names: Sequence[str]) -> set[type]:
    return {getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)}


def _of_ours(optimizer: FlatAdam, pairs: Sequence[tuple[torch.dtype, torch.dtype]]) -> OptimizerKind:
    for dtype, true in pairs:
        if true != torch.float32:
            raise MemoryPlanError(
                f"{type(optimizer).__name__} keeps master weights in float32, and this model (in {dtype}) has them in {true}: use "
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


def _tried(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> OptimizerKind:
    try:
        sight = probe_optimizer(optimizer, group)
    except OptimizerProbeError as error:
        raise MemoryPlanError(str(error)) from error
    if sight == "others":
        raise MemoryPlanError(
            f"{type(optimizer).__name__} steps on a parameter in a way that depends on other parameters or on random numbers, and "
            "with ZeRO no rank has all parameters: if it clips by a global norm, use the engine's clip_grad_norm instead; if it "
            "draws random numbers for each element, set elementwise = True in its class"
        )
    return "elementwise" if sight == "elements" else "matrices"


def __getattr__(name: str) -> Any:
    """Return the function that docs of version 0.1 show as ``kind_of``, with a DeprecationWarning."""
    if name != "kind_of":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.kind_of is now meshfold.zero_gemini.optimizer.optimizer_kind: change the import",
        DeprecationWarning,
        stacklevel=2,
    )
    return optimizer_kind
