"""LayerNorm and RMSNorm of a dim that may be split: the residual stream's, or that of all heads together (OLMo 2).

RMSNorm takes one all-reduce of row statistics over the axes of the hidden dim (sum of squares). LayerNorm takes one all-gather of
each rank's mean and variance, since E[x²] − E[x]² would lose its digits. Either backward takes one all-reduce. None is needed if
the dim is whole.
Weights are split like the dim; their gradients are summed over the axes that split tokens.

Key heads that several ranks hold count once for each of them, in the sums as in the size that these are divided by: each copy gets
the gradient of its own readers, and the projection before the norm adds those up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from meshfold import kernels
from meshfold.kernels import is_autocast
from meshfold.kernels.fuse import Norm
from meshfold.mesh import LayoutError, Mesh, Part, Placement, collectives, metadata
from meshfold.mesh.collectives import bind_enter, identity, traceable_result
from meshfold.tensor_parallel.layers.base import (
    ShardedLayer,
    shard_parameter,
    to_norm_dtype,
    without_autocast,
)
from meshfold.tensor_parallel.layers.redirection import unredirected
from meshfold.tensor_parallel.layers.repeated_spans import bind_sum_repeated, repeated_spans
from meshfold.tensor_parallel.modes import Mode, find_mode, split_evenly
from meshfold.tensor_parallel.module_kinds import eps_for, norm_eps, norm_kind, norm_offset, norm_size, norms_by_head


class _Norm(ShardedLayer):
    """Base of both norms: shards of weight and bias, and the axes that split rows and columns.

    Attributes:
        of_heads: it normalises all heads of queries or keys together, not the residual stream.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    _CENTRED = False
    offset = 0.0
    """added to the weight: 1 in Gemma's norms"""

    def _take_over(
        self,
        hidden: int,
        eps: float | None,
        weight: Tensor | None,
        bias: Tensor | None,
        mesh: Mesh,
        mode: Mode,
        heads: Part | None = None,
    ) -> None:
        mesh.require(*mode.axes, what=f"mode {mode.name!r}")
        self.mesh, self.mode, self.hidden, self.eps = mesh, mode, hidden, eps
        self.of_heads = heads is not None
        self.tokens, self.columns = mode.layout("residual" if heads is None else "hidden").values()
        repeat = 1 if heads is None else heads.repeat
        self._counted = hidden * repeat
        split_evenly(self._counted, self.columns, mesh, f"a norm's hidden size {hidden}")
        place = Placement(shape=(hidden,), axes=(self.columns,), parts={} if heads is None else {0: (heads,)})
        for name, parameter in (("weight", weight), ("bias", bias)):
            self.register_parameter(name, None if parameter is None else shard_parameter(parameter, place, mesh))
        known = next((metadata(p) for p in (self.weight, self.bias) if p is not None), None)
        self._enter = bind_enter(mesh, self.tokens)
        self._sum_repeated = bind_sum_repeated(mesh, 0, repeated_spans(known, 0, mesh))
        self._normalise = self._bind(eps_for(eps, torch.float32))
        self._normalise_float64 = self._bind(eps_for(eps, torch.float64))

    def _bind(self, eps: float) -> Callable[..., Tensor]:
        """Return the norm of rows as a function of x, weight (and bias)."""
        raise NotImplementedError

    @classmethod
    def convert(cls, module: nn.Module, eps: float | None, mesh: Mesh, mode: Mode, heads: Part | None = None) -> Self:
        """Return a norm with this rank's shards of a whole norm's weight and bias.

        Args:
            heads: the norm reads these heads, as a column layer writes them, and normalises all of them together; None: it reads
                the residual stream.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        made._take_over(norm_size(module), eps, weight, bias, mesh, mode, heads)
        made.offset = norm_offset(module)
        made.train(module.training)
        return made

    def fused_norm(self) -> Norm | None:
        """Return what :func:`meshfold.kernels.fuse.fuse` computes together with a residual sum; None where ranks share rows."""
        if self.weight is None or self.eps is None or self.mesh.size(*self.columns) > 1:
            return None
        bias = "" if self.bias is None else "bias"
        return Norm(
            centred=self._CENTRED, eps=self.eps, offset=self.offset, weight="weight", bias=bias, enter=self._enter
        )

    def _normalised(self, x: Tensor, *parameters: Tensor | None) -> Tensor:
        normalise = self._normalise_float64 if x.dtype == torch.float64 else self._normalise
        if not is_autocast(x):
            return normalise(x, *parameters)
        with without_autocast(x):
            return normalise(x, *parameters)

    def _entered(self, parameter: nn.Parameter | None) -> Tensor | None:
        if parameter is None:
            return None
        repeated = parameter if self._sum_repeated is identity else self._sum_repeated(parameter)
        return repeated if self._enter is identity else self._enter(repeated)

    def _factor(self) -> Tensor | None:
        weight = self._entered(self.weight)
        return weight if weight is None or not self.offset else shifted(weight, self.offset)

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps}, mode={self.mode.name}"


class RMSNorm(_Norm):
    """``x / sqrt(mean(x²) + eps) · weight`` over the whole hidden dim (arXiv 1910.07467). ``.. h`` to ``.. h``, local blocks."""

    def __init__(
        self,
        hidden: int,
        eps: float | None = 1e-6,
        *,
        mesh: Mesh,
        mode: str | Mode = "1d",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        weight = torch.ones(hidden, device=device, dtype=dtype)
        self._take_over(hidden, eps, weight, None, mesh, find_mode(mode))

    def _bind(self, eps: float) -> Callable[..., Tensor]:
        key = ("rms_norm", self.columns, self._counted, eps)
        return self.mesh.once(key, lambda: bind_rms_norm(self.mesh, self.columns, self._counted, eps))

    @unredirected
    def forward(self, x: Tensor) -> Tensor:
        return self._normalised(x, self._factor())


class LayerNorm(_Norm):
    """``(x − mean) / sqrt(var + eps) · weight + bias`` over the whole hidden dim. ``.. h`` to ``.. h``, local blocks."""

    _CENTRED = True

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        mesh: Mesh,
        mode: str | Mode = "1d",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        weight = torch.ones(hidden, device=device, dtype=dtype)
        shift = torch.zeros(hidden, device=device, dtype=dtype) if bias else None
        self._take_over(hidden, eps, weight, shift, mesh, find_mode(mode))

    def _bind(self, eps: float) -> Callable[..., Tensor]:
        key = ("layer_norm", self.columns, self._counted, eps)
        return self.mesh.once(key, lambda: bind_layer_norm(self.mesh, self.columns, self._counted, eps))

    @unredirected
    def forward(self, x: Tensor) -> Tensor:
        return self._normalised(to_norm_dtype(x), self._factor(), self._entered(self.bias))


class HeadNorm(ShardedLayer):
    """LayerNorm or RMSNorm over the elements of one head, of queries or keys whose heads are split (Qwen3, Gemma 3).

    ``.. head_dim`` to ``.. head_dim``. Every rank has the whole weight and normalises its own heads of its own tokens, so
    the weight's gradient is summed over the axes of both.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, module: nn.Module, mesh: Mesh, mode: Mode) -> None:
        """Args:
        module: the whole norm, of any class that computes what torch's do.
        """
        super().__init__()
        mesh.require(*mode.axes, what=f"mode {mode.name!r}")
        self.mesh, self.mode, self.head_dim, self.eps = mesh, mode, norm_size(module), norm_eps(module)
        self.centred, self.offset = norm_kind(module) == "layer", norm_offset(module)
        place = Placement(shape=(self.head_dim,), axes=((),))
        for name in ("weight", "bias"):
            whole = getattr(module, name, None)
            self.register_parameter(name, None if whole is None else shard_parameter(whole, place, mesh))
        hidden = mode.layout("hidden")
        self.summed = (*hidden["m"], *hidden["n"])
        self._enter = bind_enter(mesh, self.summed)
        self.train(module.training)

    @unredirected
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else self._enter(p) for p in (self.weight, self.bias))
        return self.normalised(x, weight, bias)

    def normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return ``x`` normalised, with a weight and a bias whose gradients the caller has summed."""
        weight = None if weight is None else shifted(weight, self.offset)
        eps = eps_for(self.eps, x.dtype)
        x = to_norm_dtype(x) if self.centred else x
        with without_autocast(x):
            return kernels.layer_norm(x, weight, bias, eps) if self.centred else kernels.rms_norm(x, weight, eps)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, eps={self.eps}, mode={self.mode.name}"


class HeadNorms(ShardedLayer):
    """A norm for each head, of queries or keys whose heads are split (StableLM): ``b n s head_dim`` to the same.

    Every rank has the weights of all heads, under the names that they had, and uses those of its own. So each weight gets a
    gradient on every rank, in one sum for all of them.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, mode: Mode, heads: Part) -> None:
        """Args:
        module: the whole module, with a list of norms.
        heads: how the heads are split; its elements are heads.
        """
        super().__init__()
        self.mesh, self.mode, self._list = mesh, mode, norms_by_head(module)
        norms: Any = module.get_submodule(self._list)
        self.add_module(self._list, nn.ModuleList(HeadNorm(norm, mesh, mode) for norm in norms))
        hidden = mode.layout("hidden")
        place = Placement(shape=(heads.size,), axes=(hidden["n"],), parts={0: (heads,)})
        self.own: list[int] = place.coordinates(mesh, 0).tolist()
        self.summed = (*hidden["m"], *hidden["n"])
        self._enter = bind_enter(mesh, self.summed)
        self.train(module.training)

    @unredirected
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != len(self.own):
            raise LayoutError(f"norms of {len(self.own)} heads, the second of four dims, are given {list(x.shape)}")
        norms: Any = self.get_submodule(self._list)
        weights, biases = (self._entered([getattr(norm, name) for norm in norms]) for name in ("weight", "bias"))
        return torch.cat(
            [norms[i].normalised(part, weights[i], biases[i]) for i, part in zip(self.own, x.split(1, 1), strict=True)],
            1,
        )

    def _entered(self, parameters: list[nn.Parameter | None]) -> Sequence[Tensor | None]:
        given: list[Tensor] = [p for p in parameters if p is not None]
        return self._enter(torch.stack(given)).unbind() if len(given) == len(parameters) else parameters

    def extra_repr(self) -> str:
        return f"heads {self.own} here, mode={self.mode.name}"


def shifted(weight: Tensor, offset: float) -> Tensor:
    """Return ``weight + offset``, at least in float32; the weight itself without an offset."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset if offset else weight


def bind_rms_norm(mesh: Mesh, columns: tuple[str, ...], hidden: int, eps: float) -> Callable[..., Tensor]:
    """Bind RMSNorm of rows whose columns are split over axes: a function of ``x [.., h]`` and ``weight [h]`` or None."""
    if mesh.size(*columns) == 1:
        return lambda x, weight: kernels.rms_norm(x, weight, eps)
    mesh.prepare(*columns)

    class SplitRMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
            squares = collectives.all_reduce(kernels.rms_norm_stats(x), mesh.group(*columns))
            rstd = torch.rsqrt(squares / hidden + eps)
            ctx.save_for_backward(x, weight, rstd)
            return traceable_result(kernels.rms_norm_apply(x, weight, rstd))

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, weight, rstd = ctx.saved_tensors
            sums = collectives.all_reduce(kernels.rms_norm_backward_stats(dy, x, weight, rstd), mesh.group(*columns))
            dx, dweight = kernels.rms_norm_backward_apply(dy, x, weight, rstd, sums, hidden)
            return dx, None if dweight is None else dweight.to(weight.dtype)

    def normalise(x: Tensor, weight: Tensor | None) -> Tensor:
        y: Tensor = SplitRMSNorm.apply(x, weight)
        return y

    return normalise


def bind_layer_norm(mesh: Mesh, columns: tuple[str, ...], hidden: int, eps: float) -> Callable[..., Tensor]:
    """Bind LayerNorm of rows whose columns are split over axes: a function of ``x [.., h]``, weight and bias (``[h]`` or None)."""
    if mesh.size(*columns) == 1:
        return lambda x, weight, bias: kernels.layer_norm(x, weight, bias, eps)
    mesh.prepare(*columns)

    class SplitLayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            group = mesh.group(*columns)
            stats = collectives.all_gather(kernels.layer_norm_stats(x).unsqueeze(0), group)
            mean, rstd = kernels.layer_norm_joined(stats, eps)
            ctx.save_for_backward(x, weight, mean, rstd)
            ctx.has_bias = bias is not None
            return traceable_result(kernels.layer_norm_apply(x, weight, bias, mean, rstd))

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, weight, mean, rstd = ctx.saved_tensors
            local = kernels.layer_norm_backward_stats(dy, x, weight, mean, rstd)
            sums = collectives.all_reduce(local, mesh.group(*columns))
            dx, dweight, dbias = kernels.layer_norm_backward_apply(
                dy, x, weight, mean, rstd, sums, hidden, ctx.has_bias
            )
            return (
                dx,
                None if dweight is None else dweight.to(weight.dtype),
                None if dbias is None else dbias.to(x.dtype),
            )

    def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y: Tensor = SplitLayerNorm.apply(x, weight, bias)
        return y

    return normalise
