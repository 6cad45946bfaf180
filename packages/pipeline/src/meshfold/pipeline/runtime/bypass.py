"""Whether what is used behind a border between stages has come over it, seen in autograd's graph of a forward without values.

At the border stands a block, and what it is called with travels. Whatever else was computed from weights before it is not there
behind it: a residual round several blocks, the output of an early block that the model's end uses too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A point in a forward at which a block was called.

    Attributes:
        travels: nodes of the graph that made what the block was called with.
        time: nodes with a smaller number were made before.
    """

    travels: frozenset[Any]
    time: int

    @classmethod
    def now(cls, travels: Sequence[Tensor]) -> Crossing:
        """A block is called with these tensors."""
        made: Any = torch.zeros((), requires_grad=True).clone().grad_fn
        return cls(travels=frozenset(t.grad_fn for t in travels), time=made._sequence_nr())

    def is_bypassed(self, later: Sequence[Tensor]) -> bool:
        """Whether tensors that were computed later depend on one from before that did not travel."""
        waiting = [tensor.grad_fn for tensor in later]
        seen: set[Any] = set(self.travels)
        while waiting:
            node: Any = waiting.pop()
            if (
                node is None or node in seen or hasattr(node, "variable")
            ):  # a leaf is there, whenever it is used
                continue
            if node._sequence_nr() < self.time:
                return True
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
        return False
