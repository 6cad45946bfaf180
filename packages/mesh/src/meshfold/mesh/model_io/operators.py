"""Operators of a step: what each computes and moves, counted on meta tensors, so that any machine can be asked how long it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of one shape.

    Attributes:
        flop: that ``torch.utils.flop_counter`` knows: matmuls, convolutions, attention.
        bytes: that it reads and writes.
        is_attention: its matmuls are those of attention, which reach less of a device's rate.
    """

    flop: int
    bytes: int = 0
    is_attention: bool = False


class OperatorCounter(TorchDispatchMode):
    """Context manager: counts the operators that run inside it, those of backward too.

    Attributes:
        counts: how often each ran.
        flop: of all together.
        repeated_flop: of these, while ``is_repeating``.
        is_repeating: whether a backward runs a forward again, as recomputation does; a :class:`DryRun` sets it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Operator] = Counter()
        self.flop = self.repeated_flop = 0
        self.is_repeating = False

    def note(self, operator: Operator) -> None:
        """Count an operator once."""
        self.counts[operator] += 1
        self.flop += operator.flop
        self.repeated_flop += operator.flop * self.is_repeating

    def add_attention(self, flop: int) -> None:
        """Count attention that is in no operator: on the meta device :class:`DryRun` stands in for it."""
        self.note(Operator(flop, is_attention=True))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not func.is_view and func.overloadpacket not in _MAKES_NOTHING:
            formula = flop_registry.get(func.overloadpacket)
            flop = 0 if formula is None else int(formula(*args, **kwargs, out_val=made))
            touched = {id(x): x for x in tree_iter((args, kwargs, made)) if isinstance(x, Tensor)}
            self.note(Operator(flop, sum(x.numel() * x.element_size() for x in touched.values())))
        return made


_MAKES_NOTHING = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
    torch.ops.aten.detach,
    torch.ops.aten.alias,
    torch.ops.aten.lift_fresh,
    torch.ops.aten._unsafe_view,
    torch.ops.aten._reshape_alias,
    torch.ops.aten.is_same_size,
}
"""Operators that touch no memory."""
