"""Linear layers with deferred weight gradients, which split W from B.

    forward  y  = x wᵀ + b
    B        dx = dy w
    W        dw += dyᵀ x,  db += Σ dy

:func:`defer_weight_gradients` switches the linear layers of a module to it, in place: names, parameters and hooks stay.
Everything else in a stage (norms, tables, all but linear layers) gets its gradient in B, by autograd. Without a queue that
collects (:mod:`meshfold.mesh.parameters.deferred_wgrad`) dw is computed in backward, as in an ordinary layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.kernels import applied
from meshfold.mesh.parameters import (
    DefersWeightGrad,
    MatmulOperands,
    WeightGradQueue,
    WeightGradSite,
    accumulate_grad,
    accumulate_grad_product,
    defer_weight_grad,
    may_defer,
)


class _Product(torch.autograd.Function):
    """Multiply ``.. k`` by a weight ``n k`` (``k n`` if turned) and add a bias, both hidden from autograd.

    Give it a site, or the ticket of one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        turned: bool,
        site: WeightGradSite | None,
        ticket: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ticket)
        ctx.turned, ctx.site = turned, site
        y = F.linear(x, weight.t() if turned else weight, bias)
        if not torch.compiler.is_compiling() and not y._is_view():
            return y
        # Autograd forbids changing a view returned by a Function in place, as nn.ReLU(inplace=True) after the layer would. With
        # more than two dims y may be one. Here that is safe: nothing else holds the base of y.
        unviewed: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
        return unviewed

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, ticket = ctx.saved_tensors
        flat = x.dim() == 2
        rows = dy if flat else dy.reshape(-1, dy.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = rows @ (weight.t() if ctx.turned else weight)
            dx = dx if flat else dx.view(x.shape)
        given = x if flat else x.reshape(-1, x.shape[-1])
        if ctx.site is not None:
            ctx.site.take(given, rows)
            return dx, None, None, None, None, None
        return dx, None, None, None, None, defer_weight_grad(ticket, given, rows)


_product = applied(_Product)


class _Deferring:
    """Mixin that is added to a linear layer's class.

    Attributes:
        computes_linear: True, so that :mod:`meshfold.kernels.fuse` may treat the layer as a head.
    """

    computes_linear = True
    _turned = False

    def forward(self: Any, x: Tensor) -> Tensor:
        weight, bias, site = self.weight, self.bias, WeightGradSite.of(self)
        casts = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if (
            site is None
            or casts
            or not torch.is_grad_enabled()
            or not weight.requires_grad
            or (bias is not None and not bias.requires_grad)
            or not may_defer(weight)
            or not may_defer(bias)
            or torch._C._are_functorch_transforms_active()  # torch.vmap, torch.func.grad: their own graphs
        ):
            return F.linear(x, weight.t() if self._turned else weight, bias)
        free = None if bias is None else bias.detach()
        y: Tensor
        if x.requires_grad and not torch.compiler.is_compiling():  # autograd calls the backward even without a ticket
            y = _product(x, weight.detach(), free, self._turned, site, None)
        else:
            y = _product(x, weight.detach(), free, self._turned, None, site.ticket)
        return y

    def add_weight_gradients(self: Any, pairs: Sequence[MatmulOperands], *, batched: bool) -> None:
        """Add the gradients of pairs to the parameters' own; batched: by one product for all pairs."""
        # Looked up each time, since they may be replaced.
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if batched and len(pairs) > 1:
            pairs = [(torch.cat([x for x, _ in pairs]), torch.cat([dy for _, dy in pairs]))]
        for x, dy in pairs:
            if weight is not None:
                left, right = (x, dy) if self._turned else (dy, x)
                accumulate_grad_product(weight, left.t(), right)
            if bias is not None:
                accumulate_grad(bias, dy.sum(0))


class _DeferringTurned(_Deferring):
    _turned = True


_classes: dict[type, type] = {}


def defer_weight_gradients(module: nn.Module, *, batched: bool = False) -> WeightGradQueue:
    """Switch the linear layers of a module to deferred weight gradients, in place.

    nn.Linear, transformers' Conv1D and layers that know how (tensor-parallel ones). A layer with its own forward, or with a
    computed weight instead of a parameter, stays unchanged.

    Args:
        module: it, and everything in it.
        batched: compute the gradients of several micro-batches that are due at once in one larger product. It rounds
            differently from one product per micro-batch, and concatenates x and dy.

    Returns:
        Where the gradients wait: ``with queue.collecting(0): loss.backward()``, later ``queue.compute(0)``.
    """
    queue = WeightGradQueue()
    for layer in module.modules():
        site = _site_of(layer, batched)
        if site is not None:
            site.queue = queue
    return queue


def _site_of(layer: nn.Module, batched: bool) -> WeightGradSite | None:
    known = WeightGradSite.of(layer)
    if known is not None:
        return known
    if isinstance(layer, DefersWeightGrad):
        return layer.defer_weight_gradient()
    turned = _is_conv1d(layer)
    if not (turned or (isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward)):
        return None
    if not isinstance(layer._parameters.get("weight"), nn.Parameter):
        return None
    kind = type(layer)
    if kind not in _classes:
        base = _DeferringTurned if turned else _Deferring
        _classes[kind] = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
    layer.__class__ = _classes[kind]

    def add(deferring: Any, pairs: Sequence[MatmulOperands]) -> None:
        # The method is looked up at each call: a subclass that computes in fp8 has its own.
        deferring.add_weight_gradients(pairs, batched=batched)

    site = WeightGradSite.for_layer(layer, add)
    site.attach(layer)
    return site


def _is_conv1d(layer: nn.Module) -> bool:
    """Return True for transformers' ``Conv1D``, a linear layer with a weight ``k n``; recognised without importing transformers."""
    weight, width = layer._parameters.get("weight"), getattr(layer, "nf", None)
    named = any(kind.__name__ == "Conv1D" for kind in type(layer).__mro__[:2])
    return named and isinstance(width, int) and weight is not None and weight.shape[-1] == width
