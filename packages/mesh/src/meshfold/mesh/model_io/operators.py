"""Operators of a step: what each computes and moves, counted on meta tensors, so that it can be timed for any machine."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from meshfold.mesh.model_io.known_kernels import run_once
from meshfold.mesh.model_io.nested_tensors import tensors_in

FORWARD, BACKWARD, REPEATED = "forward", "backward", "repeated"


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of one shape.

    Attributes:
        flop: that ``torch.utils.flop_counter`` knows: matmuls, convolutions, attention.
        bytes: that it reads and writes.
        head_dim: of attention, whose matmuls reach less of a device's rate; 0 of other operators.
        computed: share of its FLOP that is computed: causal attention skips half of the pairs that are counted.
        phase: in which it runs: :data:`FORWARD`, :data:`BACKWARD`, or :data:`REPEATED`: of a forward that a backward runs again.
        ours: it is one of our kernels, which Python launches.
        residual: it is one of these, and adds to a residual stream too: it was given a ``residual``.
        fp8: it multiplies operands in fp8.
        side: smallest side of a product's matrices; 0: not known.
        outputs: elements of a product's result; 0: not known.
        keys: of attention, those that a query is computed with, on average; 0: not known.
        name: of an operator without FLOP, ``aten.gelu`` or ``dropout.drop``; one in place has the name of the other.
    """

    flop: int
    bytes: int = 0
    head_dim: int = 0
    computed: float = 1.0
    phase: str = "forward"
    ours: bool = False
    residual: bool = False
    fp8: bool = False
    side: int = 0
    outputs: int = 0
    keys: int = 0
    name: str = ""


class OperatorCounter(TorchDispatchMode):
    """Context manager: counts the operators that run inside it, those of backward too.

    Attributes:
        counts: how often each ran.
        flop: of all together.
        repeated_flop: of these, inside :meth:`repeating`.
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # it imports Triton

        super().__init__()  # type: ignore[no-untyped-call]
        aten = torch.ops.aten  # the registry has no operators in place: panels of SUMMA and of rings are added by them
        in_place = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}
        self._formulas = {**flop_registry, **{changes: flop_registry[makes] for changes, makes in in_place.items()}}
        self.counts: Counter[Operator] = Counter()
        self.flop = self.repeated_flop = 0
        self._is_repeating = False
        self._inside: int | None = None  # FLOP so far of what counts as one operator
        self._times = 1

    def note(self, operator: Operator) -> None:
        """Count an operator once, or as often as :meth:`times` says."""
        self.counts[operator] += self._times
        self.flop += self._times * operator.flop
        self.repeated_flop += self._times * operator.flop * self._is_repeating

    @property
    def _phase(self) -> str:
        """The phase that runs now: autograd knows whether it is in a backward."""
        if torch._C._current_graph_task_id() == -1:
            return FORWARD
        return REPEATED if self._is_repeating else BACKWARD

    @contextmanager
    def times(self, number: int) -> Iterator[None]:
        """Context manager: what runs inside counts ``n`` times, such as parts of one size. May nest."""
        before, self._times = self._times, number * self._times
        try:
            yield
        finally:
            self._times = before

    def add_attention(self, flop: int, head_dim: int = 128, computed: float = 1.0, keys: int = 0) -> None:
        """Count attention that no operator shows: on the meta device :class:`DryRun` stands in for it.

        ``keys``: that a query may see, of which a share is ``computed``.
        """
        seen = round(computed * keys)
        self.note(Operator(flop, head_dim=head_dim, computed=computed, phase=self._phase, keys=seen))

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Context manager around a forward that a backward runs again, as recomputation does."""
        before, self._is_repeating = self._is_repeating, True
        try:
            yield
        finally:
            self._is_repeating = before

    def as_one(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose operators count as one that reads its arguments and writes what it returns.

        The bytes of each tensor count once, also of one that it reads and overwrites.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside is not None:
                return function(*args, **kwargs)
            if self._is_alone():
                made, flop = run_once(function, args, kwargs, self._counted_inside)
            else:
                made, flop = self._counted_inside(lambda: function(*args, **kwargs))
            moved, name = _bytes_of((args, kwargs, made)), "" if flop else _kernel_name(function)
            place = _residual_place(function)
            adds = place is not None and place < len(args) and args[place] is not None
            self.note(Operator(flop, moved, phase=self._phase, ours=True, residual=adds, name=name))
            return made

        return run

    def _is_alone(self) -> bool:
        """Return True if this counter counts now, and no other mode looks at the operators inside a kernel."""
        modes = _get_current_dispatch_mode_stack()
        others = [mode for mode in modes if mode is not self]
        return len(others) < len(modes) and all(getattr(mode, "is_in_kernel", False) for mode in others)

    def _counted_inside(self, function: Callable[[], Any]) -> tuple[Any, int]:
        """Return what a function makes, and the FLOP inside it."""
        self._inside, outside = 0, self._times
        self._times = 1
        try:
            return function(), self._inside
        finally:
            self._inside, self._times = None, outside

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
            formula = self._formulas.get(func.overloadpacket)
            # A product with a wider result has its dtype as a last argument, which the formulas do not know.
            given = [each for each in args if not isinstance(each, torch.dtype)]
            flop = 0 if formula is None else int(formula(*given, **kwargs, out_val=made))
            if self._inside is None:
                fp8 = func.overloadpacket is torch.ops.aten._scaled_mm
                moved = 0 if func.overloadpacket in _MESSAGES else _bytes_of((args, kwargs, made))
                side, outputs = _sizes_of(func.overloadpacket, args)
                name = "" if flop else str(func.overloadpacket).removesuffix("_")
                self.note(Operator(flop, moved, phase=self._phase, fp8=fp8, side=side, outputs=outputs, name=name))
            else:
                self._inside += self._times * flop
        return made


@cache
def _residual_place(function: Callable[..., Any]) -> int | None:
    """Return the place of a kernel's argument ``residual``; None if it has none."""
    names = list(inspect.signature(function).parameters)
    return names.index("residual") if "residual" in names else None


def _kernel_name(function: Callable[..., Any]) -> str:
    """Return a kernel's name: the last part of its module's, and its own."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    return f"{module.rpartition('.')[2]}.{name}"


def _sizes_of(packet: Any, args: tuple[Any, ...]) -> tuple[int, int]:
    """Return the smallest of the three sides of a product of matrices, and the elements of its result; zeros of other operators."""
    first = _FACTORS.get(packet)
    if first is None:
        return 0, 0
    left, right = args[first : first + 2]
    rows, terms, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    return int(min(rows, terms, columns)), int(left.numel() // max(1, terms) * columns)


def _bytes_of(values: Any) -> int:
    """Return the bytes of all tensors in nested values, each once."""
    tensors = {id(x): x for x in tensors_in(values)}
    return sum(x.numel() * x.element_size() for x in tensors.values())


_FACTORS = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten._scaled_mm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.addmm_: 1,
    torch.ops.aten.baddbmm: 1,
    torch.ops.aten.baddbmm_: 1,
}
"""Products of two matrices: the place of the first among the arguments."""

_MESSAGES = {
    torch.ops._c10d_functional.all_gather_into_tensor,
    torch.ops._c10d_functional.all_gather_into_tensor_out,
    torch.ops._c10d_functional.reduce_scatter_tensor,
    torch.ops._c10d_functional.all_to_all_single,
    torch.ops._c10d_functional.wait_tensor,
}
"""Operators that the host launches and whose seconds on a device are those of their messages, which a log has. Sums and broadcasts
are not among them: they copy their operand first."""

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
