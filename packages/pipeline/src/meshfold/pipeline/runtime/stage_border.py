"""The border between two stages: a received tensor enters the code of the next; tensors that cannot cross are refused.

The arguments of a stage's first block are sent. All other values computed from weights before that block are absent after it: a
residual around several blocks, say, or the output of an early block that the model's end uses too. Autograd's graph of a forward on
placeholders shows whether a model uses such a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh import LayoutError
from meshfold.mesh.tracking import Dims, TrackedLayout, axes_of, is_open, tracked_layout


class _Enter(torch.autograd.Function):
    """Gives ``inside`` the autograd history of ``received``, which has the same values."""

    @staticmethod
    def forward(ctx: Any, inside: Tensor, received: Tensor) -> Tensor:
        ctx.mark_dirty(inside)
        return inside

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def inject(inside: Tensor, received: Tensor, grad: bool) -> Tensor:
    """Make a tensor of the model's code the received one, in place: all code that refers to it finds the right values.

    It may be changed in place then, as a block's output may be, unless it is a view of another tensor of the code.

    Args:
        inside: an argument of a block.
        received: from the stage before.
        grad: whether a gradient is needed.

    Returns:
        The tensor whose ``.grad`` backward fills.
    """
    if not grad or inside._is_view():
        inside.data = received.detach()
        return inside.requires_grad_(grad)
    root = received.detach().requires_grad_()
    inside.data = root.detach()
    _Enter.apply(inside, root)
    return root


def same_storage(given: Tensor) -> Tensor:
    """Return another tensor with the same memory that is not a view, like a block's output, and with the same history."""
    if given.requires_grad:
        return given.view_as(given)
    made = torch.empty(0, dtype=given.dtype, device=given.device)
    made.data = given
    return made


Layouts = dict[int, TrackedLayout]
"""By place among the arguments of a block; empty if the forward is not observed."""


def layouts_of(leaves: Mapping[int, Tensor]) -> Layouts:
    """Return the tracked layouts of a block's arguments."""
    return {place: known for place, leaf in leaves.items() if (known := tracked_layout(leaf)) is not None}


def check_handed_on(block: int, began: Layouts, leaves: Mapping[int, Tensor]) -> None:
    """Check that a stage's output has the layout of its first block's input.

    Args:
        block: the next stage's first.
        began: of this stage's first block.
        leaves: its arguments.

    Raises:
        LayoutError: if it does not.
    """
    for place, known in layouts_of(leaves).items():
        now, before = known.dims, began[place].dims if place in began else known.dims
        if len(before) == len(now) and before != now:
            raise LayoutError(
                f"block {block}, the first of a stage, is called with a tensor {list(leaves[place].shape)} {_split(now)}, and the "
                f"first block of the stage before with one {_split(before)}: blocks of a pipeline must return a tensor that is "
                "split over ranks like their input. Restore the layout at the end of the block, or use a spec without pipeline"
            )


def _split(dims: Dims) -> str:
    found = [f"dim {number} is split over {', '.join(axes_of(dim))}" for number, dim in enumerate(dims) if axes_of(dim)]
    found += [f"nothing tells how dim {number} is split" for number, dim in enumerate(dims) if is_open(dim)]
    return f"of which {' and '.join(found)}" if found else "that is whole on every rank"


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A point in a forward at which a block was called.

    Attributes:
        travels: graph nodes of the block's arguments.
        time: nodes with a smaller number were made before.
    """

    travels: frozenset[Any]
    time: int

    @classmethod
    def now(cls, travels: Sequence[Tensor]) -> Crossing:
        """Record that a block is called with these tensors."""
        made: Any = torch.zeros((), requires_grad=True).clone().grad_fn
        return cls(travels=frozenset(t.grad_fn for t in travels), time=made._sequence_nr())

    def is_bypassed(self, later: Sequence[Tensor]) -> bool:
        """Return True if later tensors depend on an earlier one that was not sent."""
        waiting = [tensor.grad_fn for tensor in later]
        seen: set[Any] = set(self.travels)
        while waiting:
            node: Any = waiting.pop()
            if node is None or node in seen or hasattr(node, "variable"):  # leaves are available on every stage
                continue
            if node._sequence_nr() < self.time:
                return True
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
        return False
