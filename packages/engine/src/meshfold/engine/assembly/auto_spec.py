"""``parallel="auto"``: the spec that ``meshfold.planner.suggest`` puts first for the model, the batch and the devices at hand."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshfold.engine.moved import integration
from meshfold.engine.precision import Precision
from meshfold.mesh import SpecError
from meshfold.mesh.processes import Environment, running_world
from meshfold.mesh.spec import reject_unknown_arguments

AUTO = "auto"
F = TypeVar("F", bound=Callable[..., None])


def resolve_arguments(init: F) -> F:
    """Decorator for the engine's constructor: refuses unknown arguments, and replaces ``parallel="auto"`` by the chosen spec."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def called(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if not isinstance(bound.arguments.get("parallel"), str) or bound.arguments["parallel"] != AUTO:
            init(*args, **kwargs)
            return
        bound.apply_defaults()
        given = bound.arguments
        given["parallel"], given["recompute"] = choose_spec(
            given["model"],
            given["example"],
            clip=given["clip_grad_norm"] is not None,
            accumulation=given["gradient_accumulation"],
            **{name: given[name] for name in ("precision", "optimizer", "recompute", "device", "rules", "kernels")},
        )
        init(*bound.args, **bound.kwargs)

    return cast(F, reject_unknown_arguments(called))


def choose_spec(
    model: object,
    example: Any,
    *,
    precision: object,
    optimizer: object,
    clip: bool,
    accumulation: int,
    recompute: str | None,
    device: object,
    rules: Mapping[str, str] | None,
    kernels: object,
) -> tuple[dict[str, object], str | None]:
    """Return the spec and ``recompute`` for an engine with ``parallel="auto"``; rank 0 says what was chosen.

    Every rank chooses by itself, before it joins the others: the same, since the choice depends on the arguments and on the kind
    of its device alone.

    Args:
        model: a function that builds it.
        example: a batch with the rows of a global batch and their tokens; its values do not matter.
        precision, optimizer, recompute, device, rules, kernels: as for the engine.
        clip: the gradient's norm is clipped.
        accumulation: micro-steps of an optimizer step.

    Raises:
        SpecError: for a model that is already built, without an example, after ranks have joined, and if no spec fits.
    """
    if isinstance(model, nn.Module) or not callable(model):
        raise SpecError(
            "parallel='auto' traces the model on meta tensors, and this one is already built: give the engine a function, as in "
            "Engine(lambda: Model(config), parallel='auto', example=batch)"
        )
    tensors = [x for x in tree_leaves(example) if isinstance(x, Tensor) and x.dim() >= 2]
    if not tensors:
        raise SpecError(
            "parallel='auto' depends on the batch: give Engine(..., example=batch), with a global batch's token ids"
        )
    joined = running_world()
    if joined is not None and joined.size > 1:
        raise SpecError(
            "parallel='auto' chooses before the ranks join, and a process group is already running: make the engine first, or "
            "write the spec that `meshfold suggest` prints"
        )
    build: Callable[[], nn.Module] = model
    here, suggestions = Environment.detect(), integration("meshfold.planner.suggestions")
    rows, tokens = tensors[0].shape[:2]
    name = optimizer.get("name") if isinstance(optimizer, Mapping) else None
    found = suggestions.suggest_here(
        build,
        batch_size=int(rows) * accumulation,
        seq_len=int(tokens),
        ranks=here.world_size,
        device=None if device is None else str(device).partition(":")[0],
        precision=Precision.parse(precision).name,
        optimizer=str(name),
        clip=clip,
        accumulate=accumulation,
        rules=rules,
        kernels=kernels,
    )
    best = found.best
    if here.rank == 0:
        sys.stderr.write(f"parallel='auto' chose {suggestions.choice_words(found)}\n")
    return best.candidate.spec.to_dict(), recompute if recompute is not None else best.candidate.recompute
