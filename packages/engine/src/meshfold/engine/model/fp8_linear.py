"""A linear layer that multiplies in fp8 and replaces ``nn.Linear``; a pipeline may defer its weight gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.kernels import (
    Fp8Maximum,
    Fp8Recipe,
    Fp8Source,
    Fp8Tensor,
    Fp8Weight,
    bind_fp8_matmul,
    fp8_backward,
    fp8_forward,
    fp8_input_gradient,
    fp8_weight_gradient,
)
from meshfold.mesh.parameters import MatmulOperands, WeightGradSite, accumulate_grad, defer_weight_grad
from meshfold.mesh.tracking import is_whole, tracker, untracked, whole
from meshfold.tensor_parallel import Fp8CastProducts, bind_fp8_cast_products

_PRODUCTS, WEIGHT = "fp8_products", "fp8_weight"


@dataclass(frozen=True, kw_only=True)
class Fp8Products:
    """The products of layers of one recipe.

    Attributes:
        product: of an input and a weight, differentiable.
        deferred: of an input, a weight that autograd does not see, and a ticket (:mod:`meshfold.mesh.parameters.deferred_wgrad`).
        weight_gradient: of dy and x.
        cast: of weights that were cast before.
        weight: makes what casts a weight once for many products.
    """

    product: Callable[[Tensor, Tensor], Tensor]
    deferred: Callable[[Tensor, Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor], Tensor]
    cast: Fp8CastProducts
    weight: Callable[[], Fp8Weight]

    @classmethod
    def bind(cls, recipe: Fp8Recipe, maximum: Fp8Maximum | None) -> Fp8Products:
        """Bind them; ``maximum``: from an amax here to that over all ranks; None: it is the same."""

        class Deferred(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, w: Tensor, ticket: Tensor) -> Tensor:
                ctx.save_for_backward(x, w, ticket)
                return fp8_forward(x, w, recipe, maximum)[0]

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Any:
                x, w, ticket = ctx.saved_tensors
                dx = fp8_input_gradient(dy, w, recipe, maximum) if ctx.needs_input_grad[0] else None
                return dx, None, defer_weight_grad(ticket, x, dy)

        def deferred(x: Tensor, w: Tensor, ticket: Tensor) -> Tensor:
            y: Tensor = Deferred.apply(x.reshape(-1, x.shape[-1]), w, ticket)
            return y.view(*x.shape[:-1], w.shape[0])

        def forward(x: Tensor, w: Fp8Tensor, weight: Tensor) -> tuple[Tensor, Fp8Source | None]:
            return fp8_forward(x, w, recipe, maximum, weight=weight)

        def backward(
            x: Tensor, w: Fp8Tensor, dy: Tensor, wants: tuple[bool, bool], source: Fp8Source | None
        ) -> tuple[Tensor | None, Tensor | None]:
            return fp8_backward(dy, x, w, recipe, maximum, wants=wants, source=source)

        return cls(
            product=bind_fp8_matmul(recipe, maximum),
            deferred=deferred,
            weight_gradient=lambda dy, x: fp8_weight_gradient(dy, x, recipe, maximum),
            cast=bind_fp8_cast_products(recipe, forward, backward),
            weight=lambda: Fp8Weight(recipe, maximum),
        )


class Fp8Linear(nn.Linear):
    """``y = x wᵀ + b`` with operands in fp8, for inputs in bf16; anything else is computed as the layer's own class does."""

    computes_linear = False  # meshfold.kernels.fuse must not treat it as a head

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight.

        Raises:
            Fp8WeightError: in a forward or backward for which ranks have gathered it in fp8.
        """
        cast: Fp8Weight | None = self.__dict__.get(WEIGHT)
        if cast is not None:
            cast.check_unread()
        found: Tensor = self._parameters["weight"]  # type: ignore[assignment]
        return found

    def forward(self, x: Tensor) -> Tensor:
        if not self._is_in_fp8(x) or (not x.is_meta and torch.is_autocast_enabled(x.device.type)):
            return super().forward(x)
        y = self._multiply(x)
        return y if self.bias is None else y + self.bias

    def _is_in_fp8(self, x: Tensor) -> bool:
        """Return True if the product with an input is computed in fp8."""
        weight: Any = self._parameters["weight"]  # may travel in fp8
        return x.dtype is torch.bfloat16 and weight.dtype is torch.bfloat16

    def _multiply(self, x: Tensor) -> Tensor:
        tracking = tracker()  # the product may mix tokens only in its amax
        if tracking is None or not is_whole(tracking.dims(x)[-1]):
            return self._product(x)
        with untracked():
            y = self._product(x)
        tracking.mark(y, (*tracking.dims(x)[:-1], whole(self.out_features)))
        tracking.rows.keep(y, x)
        return y

    def _product(self, x: Tensor) -> Tensor:
        products: Fp8Products = self.__dict__[_PRODUCTS]
        weight: Any = self._parameters["weight"]
        site = WeightGradSite.of(self) if torch.is_grad_enabled() and weight.requires_grad else None
        once: Fp8Weight = self.__dict__[WEIGHT]
        cast = once.get(weight)
        if cast is not None:
            return (
                products.cast.product(x, weight, cast) if site is None else products.cast.deferred(x, cast, site.ticket)
            )
        if site is None:
            return products.product(x, weight)
        return products.deferred(x, weight.detach(), site.ticket)

    def add_weight_gradients(self, pairs: Sequence[MatmulOperands], *, batched: bool) -> None:
        """Add the weight gradients of deferred products; autograd computes the bias's.

        The layer's own class does this for what it has multiplied itself.
        """
        weight: Any = self._parameters["weight"]  # may have been replaced
        products: Fp8Products = self.__dict__[_PRODUCTS]
        for x, dy in pairs:
            if self._is_in_fp8(x):
                accumulate_grad(weight, products.weight_gradient(dy, x))
            else:
                super().add_weight_gradients([(x, dy)], batched=batched)  # type: ignore[misc]


_classes: dict[type, type] = {nn.Linear: Fp8Linear}


def is_plain_linear(module: nn.Module) -> bool:
    """Return True for ``nn.Linear`` itself, also if a pipeline has changed its class."""
    return type(module) is nn.Linear or (WeightGradSite.of(module) is not None and nn.Linear in type(module).__bases__)


def use_fp8_products(layer: nn.Linear, products: Fp8Products) -> Callable[[], None]:
    """Let a layer multiply in fp8. Return what gives it its own product back."""
    own = type(layer)
    if own not in _classes:
        _classes[own] = type(own.__name__, (Fp8Linear, own), {"__module__": own.__module__})
    layer.__class__ = _classes[own]
    layer.__dict__[_PRODUCTS], layer.__dict__[WEIGHT] = products, products.weight()

    def restore() -> None:
        layer.__class__ = own
        layer.__dict__.pop(_PRODUCTS, None)
        layer.__dict__.pop(WEIGHT, None)

    return restore
