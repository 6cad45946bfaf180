"""What a model does before its blocks, seen by running its forward up to the first of them, without values."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.evaluating import evaluating
from meshfold.pipeline.errors import ExampleError
from meshfold.pipeline.gates import Gates
from meshfold.pipeline.ghosts import standing_in

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""positional and keyword arguments of the model's forward"""


def parameters_before(
    model: nn.Module,
    gates: Gates,
    beside: Sequence[nn.Module],
    weights: Sequence[tuple[nn.Module, str]],
    example: Example,
    device: torch.device,
) -> set[str]:
    """Full names of the parameters that are used before the blocks."""
    within = {module for block in gates.blocks for module in block.modules()}
    outside = [module for module in model.modules() if module not in within]
    try:
        with evaluating(model), standing_in(outside, device):
            loose = [getattr(module, name) for module, name in weights]
            try:
                gates.look(lambda: model(*example[0], **example[1]), loose, only_first=True)
            except LayoutError:
                raise
            except Exception as error:
                raise ExampleError(
                    f"to see what {type(model).__name__} does before its blocks it was called with "
                    f"{_described(example)}, and raised {type(error).__name__}: {error}"
                ) from error
            reached = _leaves(gates.entering)
            early = [id(tensor) in reached for tensor in loose]
    finally:
        gates.entering = []
        gates._shapes.clear()
    called = [module for module in beside if module in gates.called]
    names = {
        f"{path}.{leaf}" if path else leaf
        for path, module in model.named_modules(remove_duplicate=False)
        if module in called
        for leaf, _ in module.named_parameters(remove_duplicate=False)
    }
    for (module, leaf), is_early in zip(weights, early, strict=True):
        path = next(name for name, other in model.named_modules() if other is module)
        if is_early:
            names.add(f"{path}.{leaf}" if path else leaf)
    return names


def _leaves(tensors: Sequence[Tensor]) -> set[int]:
    """Identities of the tensors that these were computed from, by autograd's graph."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[Any] = set()
    found = {id(tensor) for tensor in tensors if tensor.grad_fn is None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [after for after, _ in node.next_functions if after is not None]
    return found


def some_tokens(model: nn.Module, mesh: Mesh, axis: str, device: torch.device) -> Example:
    """Some token ids, as many rows as any split of the batch may want."""
    rows = mesh.world_size // mesh.size(axis)
    sizes = [p.shape[0] for p in model.parameters() if p.dim() > 1]
    length = min([8, *(size for size in sizes if size > 1)])  # one of them may be of a table of positions
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    labels = inspect.signature(model.forward).parameters.get("labels")
    wants = labels is not None and labels.default is inspect.Parameter.empty
    return (ids,), {"labels": ids} if wants else {}


def _described(example: Example) -> str:
    def one(value: Any) -> str:
        return f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)

    positional = [one(value) for value in example[0]]
    return ", ".join([*positional, *(f"{name}={one(value)}" for name, value in example[1].items())])
