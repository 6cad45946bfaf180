"""The linear layer in every mode: three layouts and a matmul.

=========== ============ ======================= ================
role        reads        writes                  bias ``[n]``
=========== ============ ======================= ================
column      residual     hidden                  as n of hidden
row         hidden       residual                as h of residual
head        residual     logits                  as v of logits
tied_head   residual     logits, with the embedding's weight
stem        raw input    residual                as h of residual
=========== ============ ======================= ================

    forward  y  = leave(gather(x) gather(w)) + b
    dgrad    dx = leave(gather(dy) gather(w)ᵀ)
    wgrad    dw = leave(gather(x)ᵀ gather(dy));  db = sum of dy over tokens

The bias is added once, after y has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from meshfold.mesh import Layout, Mesh, ParameterMeta, Part, Placement, annotate, metadata
from meshfold.mesh.primitives import bind_collect, bind_enter, bind_take, identity
from meshfold.tensor_parallel.algebra import MatmulPlan, plan
from meshfold.tensor_parallel.matmul import bind_matmul, lead_shape
from meshfold.tensor_parallel.modes import Mode, find_mode
from meshfold.tensor_parallel.operands import bind_sum_repeated
from meshfold.tensor_parallel.sizes import split_evenly, vocabulary_multiple

Role = Literal["column", "row", "head", "tied_head", "stem"]


class Linear(nn.Module):
    """``y = x wᵀ + b`` on local blocks.

    Takes ``.. k`` of the role's input layout, returns ``.. n`` of its output layout. The first dim takes up a change
    of the number of tokens.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: Mesh,
        mode: str | Mode = "1d",
        role: Role = "column",
        parts: Sequence[Part] = (),
        lowering: str = "gather",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Args:
            in_features, out_features: of the whole layer.
            bias: whether it has one.
            mesh: where the layer lies.
            mode: a built-in mode's name or a Mode.
            role: what it reads and writes, see the module's table.
            parts: what the output is made of, where several outputs are fused (QKV; gate and up).
            lowering: how the matmul is carried out.

        Raises:
            LayoutError: if the mesh lacks an axis of the mode or a size cannot be split.
        """
        super().__init__()
        found = find_mode(mode)
        mesh.require(*found.axes, what=f"mode {found.name!r}")
        made = nn.Linear(in_features, out_features, bias, device="meta", dtype=dtype)
        self._take_over(made, mesh, found, role, tuple(parts), stored="nk", lowering=lowering)
        if device != "meta":
            self.to_empty(device=device or "cpu")
            self.reset_parameters()

    @classmethod
    def convert(
        cls,
        module: nn.Module,
        mesh: Mesh,
        mode: Mode,
        role: Role,
        *,
        parts: Sequence[Part] = (),
        stored: Literal["nk", "kn"] = "nk",
        lowering: str = "gather",
    ) -> Linear:
        """A module with ``weight`` (and ``bias``) as a sharded layer with its blocks; real or meta weights.

        Args:
            stored: how the weight lies: ``"nk"`` as in nn.Linear, ``"kn"`` as in transformers' Conv1D.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take_over(module, mesh, mode, role, tuple(parts), stored=stored, lowering=lowering)
        made.train(module.training)
        return made

    def _take_over(
        self,
        module: nn.Module,
        mesh: Mesh,
        mode: Mode,
        role: Role,
        parts: tuple[Part, ...],
        *,
        stored: Literal["nk", "kn"],
        lowering: str,
    ) -> None:
        self.mesh, self.mode, self.role, self.lowering, self.stored = mesh, mode, role, lowering, stored
        self.plan = self.full_plan = stem_plan(mode) if role == "stem" else mode.plans[role]
        self.gather_output = self.flat_output = False
        weight, bias = module.weight, module.bias if hasattr(module, "bias") else None
        out_dim = 0 if stored == "nk" else 1
        self.out_features, self.in_features = weight.shape[out_dim], weight.shape[1 - out_dim]
        self.parts = parts
        _check_sizes(self, mesh)
        multiple = {0: vocabulary_multiple(mode, mesh)} if role in ("head", "tied_head") else {}
        w, fused = self.plan.w, {0: parts} if parts else {}
        place = Placement(
            shape=(self.out_features, self.in_features), axes=(w[self.plan.n], w[self.plan.k]), parts=fused, multiple=multiple
        )
        if stored == "kn":
            place = Placement(shape=place.shape[::-1], axes=place.axes[::-1], parts={1 - d: p for d, p in place.parts.items()})
        self.weight = adopt(weight, place, mesh)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            y = self.plan.y[self.plan.n]
            self.bias = adopt(bias, Placement(shape=(self.out_features,), axes=(y,), parts=fused, multiple=multiple), mesh)
        repeated = _repeated_spans(metadata(self.weight), out_dim, mesh)
        self._sum_weight = bind_sum_repeated(mesh, out_dim, repeated)
        self._sum_bias = bind_sum_repeated(mesh, 0, repeated)
        tokens, outputs = self.plan.y[self.plan.m], self.plan.y[self.plan.n]
        self._enter_bias = bind_enter(mesh, tokens)
        self._take_rows = bind_take(mesh, 0, self.plan.x[self.plan.m]) if role == "stem" else identity
        self._collect_rows, self._collect_columns = bind_collect(mesh, 0, tokens), bind_collect(mesh, 1, outputs)
        self._multiply = bind_matmul(self.plan, mesh, lowering=lowering)

    def reset_parameters(self) -> None:
        """Fill with the distribution of nn.Linear, the bounds taken from the whole layer."""
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def folds(self) -> int:
        """By how much the layer's output has fewer tokens than its gathered input: y's scatter along m."""
        return self.mesh.size(*(axis for dim, axis in self.plan.extras("y") if dim == self.plan.m))

    def use_entered_input(self) -> None:
        """From now on the input arrives gathered (and folded), and dx leaves as partial sums: see ``region.py``."""
        self.full_plan, self.plan = self.plan, self.plan.enter()
        self._multiply = bind_matmul(self.plan, self.mesh)

    def forward(self, x: Tensor) -> Tensor:
        weight = self._sum_weight(self.weight)
        x = self._take_rows(x)
        lead = x.shape[:-1]
        entered = self.plan.entered
        if entered and self.folds > 1:
            x = unfold(x, self.folds)
        y = self._multiply(x, weight if self.stored == "nk" else weight.t())
        if entered:
            y = y.view(*lead_shape(lead, y.numel() // y.shape[-1]), y.shape[-1])
        if self.bias is not None:
            y = y + self._enter_bias(self._sum_bias(self.bias))
        if self.flat_output:
            y = y.reshape(-1, y.shape[-1])
        return self._whole(y) if self.gather_output else y

    def _whole(self, y: Tensor) -> Tensor:
        """The output on every rank, padding cut off: for logits that are looked at, not trained on."""
        lead = y.shape[:-1]
        y = self._collect_rows(self._collect_columns(y.reshape(-1, y.shape[-1])))
        return y.view(*lead_shape(lead, y.shape[0]), y.shape[-1])[..., : self.out_features]

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, mode={self.mode.name}, role={self.role}, "
            f"x='{self.plan.x}', w='{self.plan.w}', y='{self.plan.y}'"
        )


def stem_plan(mode: Mode) -> MatmulPlan:
    """A linear layer from raw features, whole on every rank, into the residual stream."""
    residual = mode.layout("residual")
    return plan(
        Layout({"m": residual["m"], "k": ()}),
        Layout({"k": (), "n": residual["h"]}),
        Layout({"m": residual["m"], "n": residual["h"]}),
    )


def adopt(parameter: Tensor, placement: Placement, mesh: Mesh) -> nn.Parameter:
    """The local block of a whole parameter, with metadata; the same object's block if it was adopted before (ties)."""
    known: nn.Parameter | None = getattr(parameter, "_meshfold_block", None)
    if known is not None:
        return known
    if parameter.is_meta:
        local = torch.empty(placement.local_shape(mesh), dtype=parameter.dtype, device="meta")
    else:
        local = placement.shard(parameter.detach(), mesh)
    block = nn.Parameter(local, requires_grad=parameter.requires_grad)
    annotate(block, ParameterMeta(mesh=mesh, placement=placement))
    parameter._meshfold_block = block  # type: ignore[attr-defined]
    return block


def fold(x: Tensor, times: int) -> Tensor:
    """``(f b) s k -> b s (f k)``: the shape of a gathered input made that of the output it will give."""
    b, inner, k = x.shape[0] // times, x.shape[1:-1], x.shape[-1]
    return x.view(times, b, *inner, k).movedim(0, -2).reshape(b, *inner, times * k)


def unfold(x: Tensor, times: int) -> Tensor:
    """``b s (f k) -> (f b) s k``: undoes :func:`fold`."""
    b, inner, k = x.shape[0], x.shape[1:-1], x.shape[-1] // times
    return x.view(b, *inner, times, k).movedim(-2, 0).reshape(times * b, *inner, k)


def _check_sizes(layer: Linear, mesh: Mesh) -> None:
    """Refuse what cannot be split; the vocabulary of a head is padded instead."""
    matmul_plan = layer.plan
    for axes in (matmul_plan.x[matmul_plan.k], matmul_plan.w[matmul_plan.k]):
        split_evenly(layer.in_features, axes, mesh, f"in_features={layer.in_features} of a {layer.role} layer")
    if layer.role not in ("head", "tied_head") and not layer.parts:
        for axes in (matmul_plan.y[matmul_plan.n], matmul_plan.w[matmul_plan.n]):
            split_evenly(layer.out_features, axes, mesh, f"out_features={layer.out_features} of a {layer.role} layer")


def _repeated_spans(meta: ParameterMeta | None, dim: int, mesh: Mesh) -> tuple[tuple[int, int, str], ...]:
    """The stretches of the local block that neighbouring ranks hold as well."""
    if meta is None or dim not in meta.placement.parts:
        return ()
    spans, start = [], 0
    parts, axes = meta.placement.parts[dim], meta.placement.axes[dim]
    for part, (_, length) in zip(parts, meta.placement.segments(mesh, dim), strict=True):
        if part.repeat > 1:
            # Neighbours along the minor axis hold the same block.
            spans.append((start, length, f"{axes[-1]}%{part.repeat}"))
        start += length
    return tuple(spans)
