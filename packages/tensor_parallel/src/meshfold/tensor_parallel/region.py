"""A region: an attention block or an MLP whose linear layers read one input.

The input is gathered once, for all of them, and its gradient leaves once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshfold.mesh import LayoutError
from meshfold.tensor_parallel.algebra import MatmulPlan
from meshfold.tensor_parallel.boundary import Boundary
from meshfold.tensor_parallel.layers.base import OnMesh
from meshfold.tensor_parallel.layers.linear import Linear, fold
from meshfold.tensor_parallel.matmul import lead_shape
from meshfold.tensor_parallel.operands import bind_enter_operand


class Region(OnMesh):
    """Gathers a module's first argument, ``.. k`` of the residual layout, once for the linear layers that read it."""

    def __init__(self, columns: list[Linear], rows: list[Linear], boundary: Boundary | None = None) -> None:
        """Args:
        columns: the layers that read it; from now on they take it gathered.
        rows: the layers that write the module's output.
        boundary: of a stream that is flattened, if the module wants its batch and sequence dims.
        """
        first = columns[0]
        self.mesh, self.plan, self.folds, self.boundary = first.mesh, first.plan, first.folds, boundary
        self._gather = bind_enter_operand(first.plan, first.mesh, "x")
        for linear in columns:
            linear.use_entered_input()
        for linear in rows:
            linear.flat_output = boundary is not None

    def enter(self, x: Tensor) -> Tensor:
        """A local block of the stream -> what the linear layers want.

        A stream flattened at a boundary gets its batch and sequence dims back. The result has the tokens of the
        layers' *output*: where that has fewer (3D), the rest is folded into the last dim, because modules read the
        shape of their output off their input.
        """
        whole = self._gather(x.reshape(-1, x.shape[-1]))
        if self.boundary is None:
            lead = lead_shape(x.shape[:-1], whole.shape[0])
        else:
            lead = self.boundary.lead
            if lead.numel() != whole.shape[0]:
                raise LayoutError(
                    f"{whole.shape[0]} tokens where the last forward had {' × '.join(map(str, lead))}: recompute a "
                    f"forward before the next one, of another shape, begins"
                )
        whole = whole.view(*lead, whole.shape[-1])
        return fold(whole, self.folds) if self.folds > 1 else whole

    def around(self, module: nn.Module) -> None:
        """Gather the module's first argument."""
        module.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, x = ("", args[0]) if args else next(iter(kwargs.items()))
        for other in (*args[1:], *kwargs.values()):
            if (
                isinstance(other, Tensor)
                and other is not x
                and other.dim() == x.dim()
                and other.shape[-1] == x.shape[-1]
            ) and other.is_floating_point():
                raise LayoutError(
                    f"{type(module).__name__} was called with two inputs of shapes {tuple(x.shape)} and "
                    f"{tuple(other.shape)}: its linear layers share one gathered input, so cross-attention is not "
                    f"supported; keep the module whole with the rule 'replicate'"
                )
        if args:
            return (self.enter(x), *args[1:]), kwargs
        return args, {**kwargs, name: self.enter(x)}


def changes_tokens(plan: MatmulPlan) -> bool:
    """Whether a rank's input and output have other tokens: x or y is gathered or scattered along m."""
    return any(dim == plan.m for operand in ("x", "y") for dim, _ in plan.extras(operand))
