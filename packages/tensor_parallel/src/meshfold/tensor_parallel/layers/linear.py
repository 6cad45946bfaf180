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

The bias is added once: by the product itself, of partial sums on the first of their ranks, or after y has been reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshfold.kernels import Fp8Recipe, Fp8Weight, is_autocast
from meshfold.mesh import Layout, Mesh, Part, Placement, metadata
from meshfold.mesh.collectives import bind_collect, bind_enter, bind_take, identity
from meshfold.mesh.parameters import MatmulOperands, WeightGradSite, accumulate_grad, may_defer, values_of
from meshfold.tensor_parallel.fp8_matmul import Fp8Gather, bind_fp8_lowering
from meshfold.tensor_parallel.layers.base import (
    BatchShape,
    ShardedLayer,
    shard_parameter,
    to_autocast_dtype,
)
from meshfold.tensor_parallel.layers.head_exchange import HeadExchange
from meshfold.tensor_parallel.layers.input_adapters import InputAdapter, as_given, rows_taken
from meshfold.tensor_parallel.layers.linear_sizes import check_sizes
from meshfold.tensor_parallel.layers.redirection import unredirected
from meshfold.tensor_parallel.layers.repeated_spans import bind_sum_repeated, repeated_spans
from meshfold.tensor_parallel.layers.waiting_head import WaitingHead
from meshfold.tensor_parallel.lowerings.gather import turns_weight
from meshfold.tensor_parallel.matmul import (
    adds_bias,
    bind_deferred_matmul,
    bind_matmul,
    bind_product,
    lead_shape,
    on_one_rank,
    weight_gradient,
)
from meshfold.tensor_parallel.modes import Mode, find_mode, vocabulary_multiple
from meshfold.tensor_parallel.plan import MatmulPlan, plan

Role = Literal["column", "row", "head", "tied_head", "stem", "adapter"]


class Linear(WaitingHead, ShardedLayer):
    """``y = x wᵀ + b`` on local blocks.

    Takes ``.. k`` of the role's input layout, returns ``.. n`` of its output layout. The first dim absorbs a change
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
            parts: the parts of the output, if several outputs are fused (QKV; gate and up).
            lowering: how the matmul is computed.

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
        input_parts: Sequence[Part] = (),
        stored: Literal["nk", "kn"] = "nk",
        lowering: str = "gather",
        matmul: MatmulPlan | None = None,
        batch: BatchShape | None = None,
        head_dim: int = 0,
        by_tokens: bool = False,
    ) -> Linear:
        """Return a sharded layer with the blocks of a module with ``weight`` (and ``bias``); real or meta weights.

        Args:
            input_parts: the parts of a row layer's input, if outputs of several layers are concatenated.
            stored: dims of the weight: ``"nk"`` as in nn.Linear, ``"kn"`` as in transformers' Conv1D.
            matmul: of a layer with a role that the mode does not have: ``"adapter"``.
            by_tokens: the layer belongs to attention in a mode with ``attention="tokens"``: its weight is whole, and it exchanges
                tokens for heads after the product (column), or heads for tokens before it (row).
            batch: of the current forward, for a head: says if logits are returned whole.
            head_dim: elements of the output that stay together: a head's, of queries, keys or values.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        matmul = mode.attention_plans[role] if by_tokens else matmul
        made._take_over(
            module,
            mesh,
            mode,
            role,
            tuple(parts),
            input_parts=tuple(input_parts),
            stored=stored,
            lowering=lowering,
            matmul=matmul,
            by_tokens=by_tokens,
        )
        made._batch, made.head_dim = batch, head_dim
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
        input_parts: tuple[Part, ...] = (),
        stored: Literal["nk", "kn"],
        lowering: str,
        matmul: MatmulPlan | None = None,
        by_tokens: bool = False,
    ) -> None:
        self.mesh, self.mode, self.role, self.lowering, self.stored = mesh, mode, role, lowering, stored
        self.plan = matmul or (stem_plan(mode) if role == "stem" else mode.plans[role])
        self._batch: BatchShape | None = None
        self._site: WeightGradSite | None = None
        self._fp8: Fp8Gather | None = None
        self.fp8_weight: Fp8Weight | None = None
        self._apart = False
        self.head_dim = 0
        weight: Tensor = module.weight  # type: ignore[assignment]
        bias: Tensor | None = getattr(module, "bias", None)
        out_dim = 0 if stored == "nk" else 1
        self.out_features, self.in_features = weight.shape[out_dim], weight.shape[1 - out_dim]
        self.parts, self.input_parts = parts, input_parts
        self.exchange: HeadExchange | None = None
        if by_tokens:
            width = self.out_features if role == "column" else self.in_features
            self.exchange = HeadExchange(mesh, mode.layout("hidden")["n"], width, parts)
            parts = ()  # the weight is not split
        else:
            check_sizes(self, mesh)
        multiple = {0: vocabulary_multiple(mode, mesh)} if role in ("head", "tied_head") else {}
        w, fused = self.plan.w, {0: parts} if parts else {}
        place = Placement(
            shape=(self.out_features, self.in_features),
            axes=(w[self.plan.n], w[self.plan.k]),
            parts=fused | ({1: input_parts} if input_parts else {}),
            multiple=multiple,
        )
        if stored == "kn":
            place = Placement(
                shape=place.shape[::-1],
                axes=place.axes[::-1],
                parts={1 - d: p for d, p in place.parts.items()},
            )
        turned = stored == "nk" and turns_weight(self.plan)
        self.weight = shard_parameter(weight, place, mesh, turned=turned)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            y = self.plan.y[self.plan.n]
            bias_at = Placement(shape=(self.out_features,), axes=(y,), parts=fused, multiple=multiple)
            self.bias = shard_parameter(bias, bias_at, mesh)
        repeated = repeated_spans(metadata(self.weight), out_dim, mesh)
        self._sum_weight = bind_sum_repeated(mesh, out_dim, repeated)
        self._sum_bias = bind_sum_repeated(mesh, 0, repeated)
        tokens, outputs = self.plan.y[self.plan.m], self.plan.y[self.plan.n]
        self._enter_bias = bind_enter(mesh, tokens)
        self.input_adapter: InputAdapter = as_given
        if role == "stem":
            self.input_adapter = partial(rows_taken, bind_take(mesh, 0, self.plan.x[self.plan.m]))
        self._collect_rows, self._collect_columns = (
            bind_collect(mesh, 0, tokens),
            bind_collect(mesh, 1, outputs),
        )
        self._bind()

    def reset_parameters(self) -> None:
        """Fill with the distribution of nn.Linear, the bounds taken from the whole layer."""
        bound = float(self.in_features**-0.5)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def folds(self) -> int:
        """Ratio of tokens between the layer's gathered input and its output: y's scatter along m."""
        return self.mesh.size(*(axis for dim, axis in self.plan.extras("y") if dim == self.plan.m))

    @property
    def gather_output(self) -> bool:
        """True in forwards that gather the output: a head's, if no loss is computed of split logits."""
        return self._batch is not None and self._batch.gather_logits

    def use_entered_input(self, adapter: InputAdapter) -> None:
        """Leave the gather of the input to an adapter (``convert/gathered_input.py``); dx is returned as partial sums."""
        self.plan = self.mesh.once(("entered", self.plan), self.plan.enter)  # shared: compiled once
        self.lowering = "gather"
        self._bind()
        self.input_adapter = adapter

    def fp8_refusal(self, recipe: Fp8Recipe) -> str:
        """Return why the layer cannot multiply in fp8 by a recipe; empty if it can."""
        if self.makes_logits or self.stored != "nk":
            return "it makes logits" if self.makes_logits else "its weight lies transposed"
        if self.lowering not in ("gather", "auto"):
            return "its matmul is done in pieces"
        if self._sum_weight is not identity:
            return "several ranks hold some of its heads, each with a part of their gradient"
        n, k = self.multiplied
        if n % recipe.multiple or k % recipe.multiple:
            return f"its width on a rank is no multiple of {recipe.multiple}"
        blocks = self.mesh.size(*self.plan.w[self.plan.n])
        if recipe.block and any(part.size * part.repeat // blocks % recipe.block for part in self.parts):
            return f"its parts on a rank are no multiples of {recipe.block}"
        return ""

    @property
    def multiplied(self) -> tuple[int, int]:
        """Outputs and inputs of the weight that this rank multiplies with: its block, gathered as the plan says."""
        blocks = {dim: self.mesh.size(*(a for d, a in self.plan.extras("w") if d == dim)) for dim in self.plan.w}
        n, k = self.weight.shape if self.stored == "nk" else self.weight.shape[::-1]
        return n * blocks[self.plan.n], k * blocks[self.plan.k]

    def use_fp8(self, recipe: Fp8Recipe | None, outer_axes: Sequence[str] = ()) -> None:
        """Multiply in fp8 from now on, in all three products as the recipe says; None restores the operands' own dtype.

        ``outer_axes``: the axes besides the mode's that split the tokens, of data and of sequences.
        """
        self._fp8 = None if recipe is None else bind_fp8_lowering(self.plan, self.mesh, recipe, tuple(outer_axes))
        self.fp8_weight = None
        self._bind()

    def defer_weight_gradient(self) -> WeightGradSite:
        """Defer dw to a site from now on (:mod:`meshfold.mesh.parameters.deferred_wgrad`); db is computed with dx."""
        if self._site is None:
            self._site = WeightGradSite.for_layer(self, type(self)._add_weight_gradients)
            self._bind()
        return self._site

    def sum_gradients_apart(self) -> tuple[str, ...]:
        """Leave the gradients of weight and bias to the code that sums them during backward, if the product sends nothing else.

        Returns:
            the axes over which they must be summed from now on; none if nothing changes.
        """
        if self.exchange is None:
            return ()
        self._apart = True
        self._enter_bias = identity
        self._bind()
        return self.plan.y[self.plan.m]

    @property
    def _multiplies(self) -> MatmulPlan:
        """Plan of the product; without axes if gradients are summed separately."""
        return (
            self.mesh.once("local matmul", lambda: plan(*map(Layout.parse, ("m k", "k n", "m n"))))
            if self._apart
            else self.plan
        )

    def _bind(self) -> None:
        """Bind the products for the layer's current plan, lowering and precision."""
        plan, mesh = self._multiplies, self.mesh
        self._alone = self._fp8 is None and (self._apart or on_one_rank(plan, mesh))
        self._adds_bias = self._fp8 is None and not self._alone and adds_bias(plan, mesh, self.lowering)
        if self._fp8 is not None:
            self._multiply = bind_product(plan, mesh, self._fp8)
            self.fp8_weight, self._cast_products = self._fp8.weight(plan, mesh), self._fp8.cast_products(plan, mesh)
        else:
            self._multiply = functional.linear if self._apart else bind_matmul(plan, mesh, lowering=self.lowering)
        if self._site is not None:
            self._multiply_deferred = bind_deferred_matmul(plan, mesh, lowering=self._fp8 or self.lowering)

    def _add_weight_gradients(self, pairs: Sequence[MatmulOperands]) -> None:
        for x, dy in pairs:
            with torch.enable_grad():
                weight = self._sum_weight(self.weight)
                operand = weight if self.stored == "nk" else weight.t()
            dw = weight_gradient(
                self._multiplies, self.mesh, x, values_of(operand), dy, lowering=self._fp8 or self.lowering
            )
            if operand is self.weight:
                accumulate_grad(self.weight, dw)
            else:
                torch.autograd.backward(operand, dw)

    @unredirected
    def forward(self, x: Tensor) -> Tensor:
        casts, bias, exchange = is_autocast(x), self.bias, self.exchange
        weight: Tensor = self.weight
        if self._sum_weight is not identity:
            weight = self._sum_weight(weight)
        if casts:
            weight = to_autocast_dtype(weight)
        lead = None
        if casts or self.input_adapter is not as_given:
            x, lead = self.input_adapter(x)
        if exchange is not None and self.role == "row":
            x = exchange.to_tokens(x.reshape(-1, x.shape[-1]))
        # Not under autocast: dw is deferred for the parameter itself, not for a cast copy.
        site = self._site
        if site is not None and (
            casts or not torch.is_grad_enabled() or not weight.requires_grad or not may_defer(self.weight)
        ):
            site = None
        cast = None if casts or self.fp8_weight is None else self.fp8_weight.get(self.weight)
        if cast is not None:
            products = self._cast_products
            y = products.product(x, weight, cast) if site is None else products.deferred(x, cast, site.ticket)
        elif site is not None:
            free = weight.detach()
            y = self._multiply_deferred(x, free if self.stored == "nk" else free.t(), site.ticket)
        else:
            operand = weight if self.stored == "nk" else weight.t()
            if bias is None or bias.dtype is not weight.dtype:
                y = self._multiply(x, operand)
            elif self._alone:
                y, bias = functional.linear(x, operand, bias), None
            # In a graph, which fuses it with what follows, and in a plan's counts the bias is an operator of its own.
            elif self._adds_bias and not (x.is_meta or torch.compiler.is_compiling()):
                y, bias = self._multiply(x, operand, self._entered(bias)), None
            else:
                y = self._multiply(x, operand)
        if exchange is not None and self.role == "column":
            y = exchange.to_heads(self._plus_bias(y, bias).reshape(-1, y.shape[-1]))
            bias = None
        if lead is not None:
            y = y.view(*lead_shape(lead, y.numel() // y.shape[-1]), y.shape[-1])
        if bias is not None:
            y = self._plus_bias(y, bias)
        return self.whole(y) if self._batch is not None and self.gather_output else y

    def _plus_bias(self, y: Tensor, bias: nn.Parameter | None) -> Tensor:
        return y if bias is None else y + self._entered(bias).to(y.dtype)

    def _entered(self, bias: nn.Parameter) -> Tensor:
        """Return the bias as the layer uses it: backward sums its gradient over the ranks that have a part of it."""
        return self._enter_bias(self._sum_bias(bias))

    def whole(self, y: Tensor) -> Tensor:
        """Return the whole output on every rank without padding, for logits that are read, not trained on."""
        lead = y.shape[:-1]
        y = self._collect_rows(self._collect_columns(y.reshape(-1, y.shape[-1])))
        return y.view(*lead_shape(lead, y.shape[0]), y.shape[-1])[..., : self.out_features]

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, mode={self.mode.name}, role={self.role}, "
            f"x='{self.plan.x}', w='{self.plan.w}', y='{self.plan.y}'"
        )


def stem_plan(mode: Mode) -> MatmulPlan:
    """Return the plan of a linear layer from raw features, whole on every rank, into the residual stream."""
    residual = mode.layout("residual")
    return plan(
        Layout({"m": residual["m"], "k": ()}),
        Layout({"k": (), "n": residual["h"]}),
        Layout({"m": residual["m"], "n": residual["h"]}),
    )
