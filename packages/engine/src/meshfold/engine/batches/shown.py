"""Values in messages: tensors by shape and dtype, containers by content; and notes on errors of a model's forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshfold.mesh.parameters import uncompiled_name

_MOST = 8  # parts shown of one value
_LONGEST = 60  # characters of a value that is not a tensor


def shown(value: Any) -> str:
    """Describe a value in a few words.

    >>> import torch
    >>> shown((torch.zeros(2, 8), {"labels": torch.zeros(2, dtype=torch.int64)}))
    "(2×8 float32, {'labels': 2 int64})"
    """
    if isinstance(value, Tensor):
        size = "×".join(map(str, value.shape)) or "scalar"
        return f"{size} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + _listed([f"{name!r}: {shown(part)}" for name, part in value.items()]) + "}"
    if isinstance(value, tuple | list):
        inside = _listed([shown(part) for part in value])
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"a {type(value).__name__}"


def called(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Describe the arguments of a call.

    >>> import torch
    >>> called((torch.zeros(2, 8),), {"labels": None})
    '(2×8 float32, labels=None)'
    """
    return f"({_listed([*map(shown, args), *(f'{name}={shown(value)}' for name, value in kwargs.items())])})"


def rows_of_tables(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the rows of the model's embeddings and the largest index passed to it; empty if it has none.

    torch only says that an index is too large.
    """
    given = [value for value in tree_leaves((args, dict(kwargs))) if isinstance(value, Tensor) and value.numel()]
    ids = [value for value in given if not value.is_floating_point() and not value.is_complex()]
    tables = [
        f"{uncompiled_name(name)} {module.weight.shape[0]}"
        for name, module in model.named_modules()
        if "Embedding" in type(module).__name__ and isinstance(getattr(module, "weight", None), Tensor)
    ]
    if not ids or not tables:
        return ""
    longest = max(value.shape[-1] for value in ids if value.dim())
    return (
        f"the largest number in it is {max(int(value.max()) for value in ids)}, its last dim has {longest}, and the model's "
        f"embeddings have so many rows: {_listed(tables)}. Give ids below the vocabulary, and no more tokens than positions"
    )


def _listed(parts: list[str]) -> str:
    more = [f"{len(parts) - _MOST} more"] if len(parts) > _MOST else []
    return ", ".join(parts[:_MOST] + more)


_ADVICE: dict[tuple[str, ...], str] = {
    ("is a view and is being modified inplace",): (
        "A block changes what it is called with in place, and under this spec that is a view of something else: write "
        "x = x + y for x += y, and torch.relu(x) for torch.relu_(x), where x is an argument of the block. What a block has "
        "made itself may be changed in place."
    ),
    ("marked with @once_differentiable",): (
        "Fused kernels and layers that are split have no second derivative: give Engine(..., kernels='off') for the kernels, and a "
        "spec without tensor."
    ),
    ("with functorch transforms", "Cannot access storage of"): (
        "A transform of torch.func (vmap, grad, jvp, ...) calls a module that this spec splits or watches: write a loop or "
        "torch.autograd.grad instead, apply the transform to a function of tensors inside of one module, or use a spec of data "
        "alone."
    ),
}
"""Advice on what to change, by words of torch's errors that do not say it."""
_IN_STAGES: dict[tuple[str, ...], str] = {
    ("appears to not have been used in the graph",): (
        "torch.autograd.grad in a forward ends where its stage begins, which gets its input without a graph: differentiate inside "
        "of one block, or use a spec without pipeline."
    ),
}


class _Explains(Protocol):
    """Object that may know why a forward failed: :class:`meshfold.engine.states.protocols.States`."""

    def explain(self, error: BaseException) -> None:
        """Add a note to the error, if it does."""


def explain_failure(error: BaseException, states: _Explains | None, *, in_stages: bool = False) -> None:
    """Add notes to an error of a model's forward or backward: its cause and what to change, where they are known.

    Args:
        error: the error.
        states: weights and gradients of the model; None if there are none yet.
        in_stages: the forward is that of a pipeline's stage.
    """
    if states is not None:
        states.explain(error)
    for words, advice in {**_ADVICE, **(_IN_STAGES if in_stages else {})}.items():
        if any(word in str(error) for word in words):
            error.add_note(advice)
