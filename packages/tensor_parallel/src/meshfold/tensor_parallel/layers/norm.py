"""LayerNorm and RMSNorm of a residual stream whose hidden dim may be split.

One all-reduce of row statistics over the axes of the hidden dim in RMSNorm (sum of squares), two in LayerNorm (mean,
then centred sum: E[x²] − E[x]² would lose its digits), one in either backward; none where the hidden dim is whole.
Weights lie like the hidden dim; their gradients are summed over the axes that split tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshfold import kernels
from meshfold.mesh import Mesh, Placement, collectives
from meshfold.mesh.primitives import enter
from meshfold.tensor_parallel.layers.linear import adopt
from meshfold.tensor_parallel.modes import Mode, find_mode
from meshfold.tensor_parallel.sizes import split_evenly


class _Norm(nn.Module):
    """What the two have in common: blocks of weight and bias, and where rows and their columns are split."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def _take_over(
        self, hidden: int, eps: float, weight: Tensor | None, bias: Tensor | None, mesh: Mesh, mode: Mode, *, whole_tokens: bool
    ) -> None:
        residual = mode.layout("residual")
        self.mesh, self.mode, self.hidden, self.eps = mesh, mode, hidden, eps
        self.tokens = () if whole_tokens else residual["m"]
        self.columns = residual["h"]
        split_evenly(hidden, self.columns, mesh, f"a norm's hidden size {hidden}")
        place = Placement(shape=(hidden,), axes=(self.columns,))
        for name, parameter in (("weight", weight), ("bias", bias)):
            self.register_parameter(name, None if parameter is None else adopt(parameter, place, mesh))

    @classmethod
    def convert(cls, module: nn.Module, eps: float, mesh: Mesh, mode: Mode, *, whole_tokens: bool = False) -> Any:
        """A norm with this rank's blocks of a whole norm's weight and bias.

        Args:
            whole_tokens: the stream it normalises has all tokens on every rank, whatever the mode says.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        shape = getattr(module, "normalized_shape", None) or weight.shape
        made._take_over(int(shape[-1]), eps, weight, bias, mesh, mode, whole_tokens=whole_tokens)
        made.train(module.training)
        return made

    def _entered(self, parameter: nn.Parameter | None) -> Tensor | None:
        return None if parameter is None else enter(parameter, self.mesh, self.tokens)

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps}, mode={self.mode.name}"


class RMSNorm(_Norm):
    """``x / sqrt(mean(x²) + eps) · weight`` over the whole hidden dim (arXiv 1910.07467). ``.. h`` to ``.. h``, local blocks."""

    def __init__(self, hidden: int, eps: float = 1e-6, *, mesh: Mesh, mode: str | Mode = "1d") -> None:
        super().__init__()
        self._take_over(hidden, eps, torch.ones(hidden), None, mesh, find_mode(mode), whole_tokens=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self._entered(self.weight)
        if self.mesh.size(*self.columns) == 1:
            return kernels.rms_norm(x, weight, self.eps)
        return _SplitRMSNorm.apply(x, weight, self.eps, self.hidden, self.mesh, self.columns)  # type: ignore[no-any-return, no-untyped-call]


class LayerNorm(_Norm):
    """``(x − mean) / sqrt(var + eps) · weight + bias`` over the whole hidden dim. ``.. h`` to ``.. h``, local blocks."""

    def __init__(self, hidden: int, eps: float = 1e-5, bias: bool = True, *, mesh: Mesh, mode: str | Mode = "1d") -> None:
        super().__init__()
        shift = torch.zeros(hidden) if bias else None
        self._take_over(hidden, eps, torch.ones(hidden), shift, mesh, find_mode(mode), whole_tokens=False)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._entered(self.weight), self._entered(self.bias)
        if self.mesh.size(*self.columns) == 1:
            return kernels.layer_norm(x, weight, bias, self.eps)
        return _SplitLayerNorm.apply(x, weight, bias, self.eps, self.hidden, self.mesh, self.columns)  # type: ignore[no-any-return, no-untyped-call]


class _SplitRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, hidden: int, mesh: Mesh, columns: tuple[str, ...]
    ) -> Tensor:
        squares = collectives.all_reduce(kernels.rms_norm_stats(x), mesh.group(*columns))
        rstd = torch.rsqrt(squares / hidden + eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.hidden, ctx.mesh, ctx.columns = hidden, mesh, columns
        return kernels.rms_norm_apply(x, weight, rstd)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        local = kernels.rms_norm_backward_stats(dy, x, weight, rstd)
        sums = collectives.all_reduce(local, ctx.mesh.group(*ctx.columns))
        dx, dweight = kernels.rms_norm_backward_apply(dy, x, weight, rstd, sums, ctx.hidden)
        return dx, None if dweight is None else dweight.to(weight.dtype), None, None, None, None


class _SplitLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        hidden: int,
        mesh: Mesh,
        columns: tuple[str, ...],
    ) -> Tensor:
        group = mesh.group(*columns)
        mean = collectives.all_reduce(kernels.layer_norm_sum(x), group) / hidden
        variance = collectives.all_reduce(kernels.layer_norm_centred_sum(x, mean), group) / hidden
        rstd = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.hidden, ctx.mesh, ctx.columns = hidden, mesh, columns
        return kernels.layer_norm_apply(x, weight, bias, mean, rstd)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        local = kernels.layer_norm_backward_stats(dy, x, weight, mean, rstd)
        sums = collectives.all_reduce(local, ctx.mesh.group(*ctx.columns))
        dx, dweight, dbias = kernels.layer_norm_backward_apply(
            dy, x, weight, mean, rstd, sums, ctx.hidden, ctx.bias_dtype is not None
        )
        return (
            dx,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(ctx.bias_dtype),
            None, None, None, None, None,
        )  # fmt: skip
