"""A region: attention whose tokens are others than the stream's, in 3D and where tokens are split within sequences.

Its code reads batch and length off its input, so that is gathered in front of the module, once for all of its linear
layers, and has the batch and length that they will give.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshfold.mesh import LayoutError
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
        self.mesh, self.mode, self.folds, self.boundary = first.mesh, first.mode.name, first.folds, boundary
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
                and other.is_floating_point()
                and other.dim() == x.dim()
                and other.shape[-1] == x.shape[-1]
            ):
                raise LayoutError(
                    f"{type(module).__name__} was called with two inputs of shapes {tuple(x.shape)} and "
                    f"{tuple(other.shape)}: its input is gathered in front of it, so cross-attention cannot be split in "
                    f"mode {self.mode!r}; keep the module whole with the rule 'replicate'"
                )
        entered = self.enter(x)
        kwargs = {key: _for_rows(value, entered.shape[0]) for key, value in kwargs.items()}
        if args:
            return (entered, *(_for_rows(value, entered.shape[0]) for value in args[1:])), kwargs
        return args, {**kwargs, name: entered}


def _for_rows(value: Any, rows: int) -> Any:
    """A mask ``b 1 s t`` that was made for the stream's rows: they are all alike, or the frame would have refused them."""
    if isinstance(value, Tensor) and value.dim() == 4 and value.shape[0] not in (1, rows):
        return value[:1]
    return value
