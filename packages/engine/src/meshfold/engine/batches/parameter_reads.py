"""Refusal of a loss that is computed with parameters of which a rank has a part, as for a penalty on weights."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import Any, Self

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from meshfold.mesh import LayoutError, metadata
from meshfold.mesh.tracking import uncompiled

_LOOKS = {"__get__", "size", "dim", "numel", "element_size", "is_floating_point", "__repr__", "stride", "detach"}
"""Names of what may be asked of a part: its shape and dtype, and what has no gradient."""
_PART = (
    "computed with a parameter of which this rank has a part, {shape}: it would be another loss. Use the optimizer's weight_decay "
    "for a penalty on weights, or a spec without tensor"
)


_PENALTIES = frozenset(
    f"{name}Backward{number}"
    for name in ("Pow", "Abs", "Sub", "Sum", "Mean", "Norm", "LinalgVectorNorm", "MseLoss")
    for number in range(6)
)
"""Nodes of autograd's graph that penalties begin with, and layers whose weights are split do not"""


class ParameterReads:
    """Looks at the first loss: at the call of a ``loss_fn``, or at the graph of what a user's own loop has computed."""

    def __init__(self) -> None:
        self._looked = self._looked_at_graph = False

    def check_graph(self, loss: Tensor) -> None:
        """Check the first loss of a user's own loop.

        Raises:
            LayoutError: if it depends on a part of a parameter otherwise than through a layer.
        """
        if self._looked_at_graph:
            return
        self._looked_at_graph = True
        waiting, seen = [loss.grad_fn], {loss.grad_fn}
        while waiting:
            node = waiting.pop()
            for following, _ in () if node is None else node.next_functions:
                parameter = getattr(following, "variable", None)
                if isinstance(parameter, nn.Parameter) and node.name() in _PENALTIES and _is_split(parameter):  # type: ignore[union-attr]
                    raise LayoutError(f"the loss is {_PART.format(shape=tuple(parameter.shape))}")
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)

    def in_first_call(self) -> AbstractContextManager[object]:
        """Context manager around a call; in the first one, a LayoutError is raised for a part of a parameter that is read."""
        if self._looked:
            return nullcontext()
        self._looked = True
        return _NoReads()


class _NoReads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._eager = ExitStack()
        self._entered: FrameType | None = None

    def __enter__(self) -> Self:
        self._eager.enter_context(uncompiled())  # a graph compiled under this mode would not be reused without it
        self._entered = sys._getframe(1)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered = None
        self._eager.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _LOOKS:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and _is_split(leaf):
                    self._refuse(leaf)
        return func(*args, **kwargs)

    def _refuse(self, parameter: nn.Parameter) -> None:
        """Raise, unless a module or Meshfold computes with the parameter: they know what it is a part of."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and _package(frame) == "torch" and frame.f_code is not nn.Module._call_impl.__code__:
            frame = frame.f_back
        reader = frame
        while frame is not None and frame is not self._entered:
            if frame.f_code is nn.Module._call_impl.__code__:
                return
            frame = frame.f_back
        if reader is None or _package(reader) == "meshfold":
            return
        place = f"{reader.f_code.co_filename}, line {reader.f_lineno}, in a loss_fn"
        raise LayoutError(f"{place}: the loss is {_PART.format(shape=tuple(parameter.shape))}")


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _is_split(parameter: nn.Parameter) -> bool:
    known = metadata(parameter)
    return known is not None and any(known.mesh.size(*axes) > 1 for axes in known.placement.axes)
