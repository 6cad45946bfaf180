"""Search for the stages that need each parameter outside the blocks, by running the forward on meta tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.model_io import eval_mode
from meshfold.pipeline.errors import ChainError, ExampleError
from meshfold.pipeline.runtime.partial_forward import ObservedForward, PartialForward
from meshfold.pipeline.runtime.placeholders import LARGE, zeros_in_place
from meshfold.pipeline.runtime.side_effects import preserved_buffers, unscaled_tables, without_randomness

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""positional and keyword arguments of the model's forward"""
Uses = dict[str, set[int]]
"""By full name of a parameter: the blocks after which it is used, before the next block is called; -1: before all blocks"""


@dataclass(kw_only=True)
class ForwardAnalysis:
    """Parameters and buffers that a forward used.

    Attributes:
        uses: of the parameters outside the blocks, and of those of ``called_outside``.
        seen: of the whole forward; None if it could not be run to its end.
        last: tensors computed after the last block.
        changed: buffers that the forward changes: those outside the blocks, and shared ones in them.
        called_outside: modules of blocks that the forward also calls outside of them, each with the blocks called last before.
    """

    uses: Uses
    seen: ObservedForward | None = None
    last: list[Tensor] = field(default_factory=list)
    changed: set[Tensor] = field(default_factory=set)
    called_outside: dict[nn.Module, set[int]] = field(default_factory=dict)

    def check(self, bounds: Sequence[int], blocks: str) -> None:
        """Raise a ChainError for stages that such a forward cannot be cut into; arguments as of :meth:`Plan.check`."""
        if self.seen is None:
            return
        self.seen.plan.check(bounds, blocks)
        for first in bounds[1:-1]:
            entry = min(index for index in self.seen.crossings if index >= first)
            later = [t for place, made in self.seen.entering.items() if place >= entry for t in made]
            if self.seen.crossings[entry].is_bypassed([*later, *self.last]):
                raise ChainError(bypassed(blocks, f"block {entry}"))


def bypassed(blocks: str, border: str) -> str:
    """Return the error text for a value that bypasses the border of a stage."""
    return (
        f"the model is cut into stages between the blocks of {blocks or 'the model'}, at {border} among others, and a stage sends "
        "on only the arguments of the next block. Another value that the model makes before that block and uses after it (a "
        "residual around all blocks, the output of an early one, a sum over blocks) is missing there. Pass it to the blocks as an "
        "argument too, or put what repeats into an nn.ModuleList"
    )


def analyze_forward(
    model: nn.Module,
    partial_forward: PartialForward,
    beside: Sequence[nn.Module],
    weights: Sequence[tuple[nn.Module, str]],
    example: Example,
    device: torch.device,
    shared: Sequence[nn.Module],
) -> ForwardAnalysis:
    """Find out what a forward does outside its blocks, as far as possible.

    Code before the blocks must be found. Code between and after them is found if the forward can run to its end on meta tensors.

    Args:
        model: real or meta; its parts are gated.
        partial_forward: of the model; gates all blocks and those of ``beside``.
        beside: modules outside the blocks.
        weights: parameters that lie in no block and no such module: module and name in it.
        example: what to call the model with.
        device: where it runs.
        shared: blocks with buffers that other modules have too.

    Raises:
        ExampleError: if the model cannot be called with the example.
        LayoutError: if it cannot be cut.
    """
    within = {module for block in partial_forward.blocks for module in block.modules()}
    outside = [module for module in model.modules() if module not in within]

    def call() -> Any:
        return model(*example[0], **example[1])

    try:
        with eval_mode(model), zeros_in_place(outside, device), unscaled_tables(model):
            loose = [getattr(module, name) for module, name in weights]
            try:
                seen, entering = partial_forward.watch(call, loose, stop=0)
            except LayoutError:
                raise
            except Exception as error:
                raise ExampleError(
                    f"{type(model).__name__} was called with {_described(example)}, to see what it does before its blocks, "
                    f"and raised {type(error).__name__}: {error}"
                ) from error
            found = ForwardAnalysis(uses=_used(model, seen, beside, weights, loose, {-1: entering}))
        partial_forward.forget()
        buffers = [
            (module, name, b) for module in model.modules() for name, b in module._buffers.items() if b is not None
        ]
        with ExitStack() as stack:
            # Materialise one block at a time, except those that are inspected later: all together might not fit.
            kept = [partial_forward.blocks[0], *shared]
            stack.enter_context(zeros_in_place([*outside, *(m for block in kept for m in block.modules())], device))
            stack.enter_context(preserved_buffers(model))
            stack.enter_context(without_randomness(tree_leaves(example)))
            stack.enter_context(_NoLargeProducts())
            stack.enter_context(_calls_outside(partial_forward, found.called_outside))
            copies = [(module._buffers[name], _writes(module._buffers[name])) for module, name, _ in buffers]
            loose = [getattr(module, name) for module, name in weights]
            try:
                seen, output = partial_forward.watch(
                    call,
                    loose,
                    stop=len(partial_forward.blocks),
                    keep=lambda block: zeros_in_place([*block.modules()], device),
                )
            except ChainError:
                raise
            except Exception:  # may fail on zeros, while a real step works
                return found
            found.seen = seen
            found.last = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
            computed = dict(seen.entering)
            computed[max(seen.plan.slots)] = [*computed.get(max(seen.plan.slots), ()), *found.last]
            for name, places in _used(model, seen, beside, weights, loose, computed).items():
                found.uses.setdefault(name, set()).update(places)
            for path, module in model.named_modules():
                for leaf, _ in (
                    module.named_parameters(remove_duplicate=False) if module in found.called_outside else ()
                ):
                    found.uses.setdefault(f"{path}.{leaf}", set()).update(found.called_outside[module])
            for (module, name, buffer), (copy, writes) in zip(buffers, copies, strict=True):
                if module._buffers[name] is not copy or _writes(copy) != writes:
                    found.changed.add(buffer)
    finally:
        partial_forward.forget()
    return found


@contextmanager
def _calls_outside(partial_forward: PartialForward, found: dict[nn.Module, set[int]]) -> Iterator[None]:
    """Context manager: record in ``found`` the largest modules of blocks that are called while no block runs."""
    within: set[nn.Module] = set()

    def see(module: nn.Module, args: Any) -> None:
        run = partial_forward.run  # None while a block runs
        if run is not None and module not in within:
            found.setdefault(module, set()).add(run.at)
            within.update(child for child in module.modules() if child is not module)

    with ExitStack() as stack:
        for block in partial_forward.blocks:
            for module in block.modules():
                if module is not block and next(module.parameters(), None) is not None:
                    stack.callback(module.register_forward_pre_hook(see).remove)
        yield


def _used(
    model: nn.Module,
    seen: ObservedForward,
    beside: Sequence[nn.Module],
    weights: Sequence[tuple[nn.Module, str]],
    loose: Sequence[Tensor],
    computed: Mapping[int, Sequence[Tensor]],
) -> Uses:
    """Return the blocks in which a forward uses parameters; ``computed``: tensors by the block called before them."""
    found: Uses = {}
    since = {place: crossing.time for place, crossing in seen.crossings.items()}
    reached = {place: _leaves(tensors, since.get(place, 0)) for place, tensors in computed.items()}
    at: dict[nn.Module, set[int]] = {}
    for module, place in seen.calls:
        at.setdefault(module, set()).add(place)
    for path, module in model.named_modules(remove_duplicate=False):
        front = f"{path}." if path else ""
        if module in beside and module in at:
            for leaf, _ in module.named_parameters(remove_duplicate=False):
                found.setdefault(front + leaf, set()).update(at[module])
        for (other, leaf), tensor in zip(weights, loose, strict=True):
            places = {place for place, leaves in reached.items() if id(tensor) in leaves}
            if other is module and places:
                found.setdefault(front + leaf, set()).update(places)
    return found


def _writes(buffer: Tensor | None) -> int:
    """Return how often a buffer was written to."""
    return 0 if buffer is None else buffer._version


class _NoLargeProducts(TorchFunctionMode):
    """Function mode that skips products with a large placeholder matrix: only the shape of the result matters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) > 1:
            x, weight = args[:2]
            if weight.numel() > LARGE and not any(weight.stride()):
                return (x[..., :1] * weight[0, 0]).expand(*x.shape[:-1], weight.shape[0])
        return func(*args, **(kwargs or {}))


def _leaves(tensors: Sequence[Tensor], since: int) -> set[int]:
    """Return the ids of the leaves that tensors were computed from, following autograd nodes from a sequence number on."""
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
        elif node._sequence_nr() < since:
            continue
        waiting += [after for after, _ in node.next_functions if after is not None]
    return found


def some_tokens(model: nn.Module, mesh: Mesh, axis: str, device: torch.device) -> Example:
    """Return some token ids, with as many rows as any split of the batch needs."""
    rows = mesh.world_size // mesh.size(axis)
    sizes = [p.shape[0] for p in model.parameters() if p.dim() > 1]
    length = min([8, *(size for size in sizes if size > 1)])  # a size may come from a table of positions
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    labels = inspect.signature(model.forward).parameters.get("labels")
    wants = labels is not None and labels.default is inspect.Parameter.empty
    return (ids,), {"labels": ids} if wants else {}


def _described(example: Example) -> str:
    def one(value: Any) -> str:
        return f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)

    positional = [one(value) for value in example[0]]
    return ", ".join([*positional, *(f"{name}={one(value)}" for name, value in example[1].items())])
