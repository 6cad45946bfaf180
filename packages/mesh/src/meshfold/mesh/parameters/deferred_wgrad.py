"""Deferred weight gradients: operands that a matmul keeps in backward, to be multiplied later.

A matmul that defers gets its weight detached, with a *ticket*: a scalar that requires a gradient, so autograd calls the backward.
There it computes dx and hands x and dy to :func:`defer_weight_grad`, which returns the ticket's gradient: none, or zero. The
code that runs backward decides, by a :class:`WeightGradQueue`, when dw is computed. Without a queue it is computed at once. dw
is added to the parameter's ``.grad`` as autograd would have done. This is how a zero-bubble pipeline splits B from W (Qi et
al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2) with no second pass through the graph.

In a graph of torch.compile the hand-over is an operation of its own, which runs whenever the graph runs. There x and dy
are copied: the memory of both belongs to the compiled graph, which uses it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import count
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from meshfold.mesh.errors import MeshfoldError
from meshfold.mesh.parameters.weight_writes import set_values, values_of

MatmulOperands = tuple[Tensor, Tensor]
"""x ``m k`` and dy ``m n`` of one matmul"""

Layer = TypeVar("Layer", bound=nn.Module)
_ATTRIBUTE = "_meshfold_site"
_sites: WeakValueDictionary[int, WeightGradSite] = WeakValueDictionary()
_numbers = count()


class WeightGradSite:
    """A matmul whose weight gradient may be deferred.

    Attributes:
        ticket: float64 scalar on the CPU that asks for a gradient; goes into the matmul.
        queue: where pairs wait; None: nowhere.
    """

    def __init__(self, add: Callable[[Sequence[MatmulOperands]], None]) -> None:
        """Args:
        add: computes dw of pairs, in order, and adds it to the parameter's ``.grad``.
        """
        number = next(_numbers)
        _operation()  # define the operation before tracing
        self.ticket = torch.tensor(float(number), dtype=torch.float64, requires_grad=True)
        self.ticket.register_post_accumulate_grad_hook(_forget)
        self.queue: WeightGradQueue | None = None
        self.add = add
        _sites[number] = self

    @classmethod
    def for_layer(cls, layer: Layer, add: Callable[[Layer, Sequence[MatmulOperands]], None]) -> WeightGradSite:
        """Return the site of a layer that keeps it; ``add`` is given the layer, which the site does not keep alive."""
        found = ref(layer)

        def add_to_layer(pairs: Sequence[MatmulOperands]) -> None:
            owner = found()
            if owner is not None:  # else nobody can read the gradient
                add(owner, pairs)

        return cls(add_to_layer)

    @staticmethod
    def of(layer: nn.Module) -> WeightGradSite | None:
        """Return the site of a layer; None if its weight gradient is not deferred."""
        found = layer.__dict__.get(_ATTRIBUTE)
        return found if isinstance(found, WeightGradSite) else None

    def take(self, x: Tensor, dy: Tensor) -> None:
        """Make dw of x and dy: when the queue computes it, or now if nothing is being collected."""
        x, dy = x.detach(), dy.detach()  # drop the graph, which would keep the stage's inputs
        if self.queue is not None and self.queue.put(self, (x, dy)):
            return
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():  # off in a backward, as a rule
            self.add([(x, dy)])

    def attach(self, layer: nn.Module) -> None:
        """Attach this site to a layer, where :meth:`of` finds it."""
        layer.__dict__[_ATTRIBUTE] = self

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copied layer is an ordinary one, whose gradients must not go to this one's parameters."""


class WeightGradQueue:
    """Holds pairs by a key (a micro-batch) until their weight gradients are computed."""

    def __init__(self) -> None:
        self._open: Hashable | None = None
        self._waiting: dict[Hashable, list[tuple[WeightGradSite, MatmulOperands]]] = {}

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Context manager around a backward: weight gradients that it leaves wait under the key.

        Raises:
            MeshfoldError: inside of another one, or for a key under which something waits.
        """
        if self._open is not None or key in self._waiting:
            raise MeshfoldError(f"weight gradients of {key!r} are collected already")
        self._open, self._waiting[key] = key, []
        try:
            yield
        finally:
            self._open = None

    def put(self, site: WeightGradSite, pair: MatmulOperands) -> bool:
        """Store a pair and return True; return False if nothing is being collected."""
        if self._open is None:
            return False
        self._waiting[self._open].append((site, pair))
        return True

    def compute(self, *keys: Hashable) -> None:
        """Add the weight gradients of these keys, in order, and release their operands.

        Raises:
            MeshfoldError: for a key under which nothing was collected.
        """
        missing = [key for key in keys if key not in self._waiting]
        if missing:
            raise MeshfoldError(f"no backward has collected weight gradients of {missing[0]!r}")
        pairs: dict[WeightGradSite, list[MatmulOperands]] = {}
        for key in keys:
            for site, pair in self._waiting.pop(key):
                pairs.setdefault(site, []).append(pair)
        with torch.no_grad(), gradient_scope():
            while pairs:
                site = next(iter(pairs))
                site.add(pairs.pop(site))  # frees its tensors before the next gradient is made

    @property
    def waiting(self) -> tuple[Hashable, ...]:
        """The keys of deferred weight gradients."""
        return tuple(self._waiting)

    @property
    def held_bytes(self) -> int:
        """Bytes of the operands held; a tensor that several matmuls read counts once."""
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for entries in self._waiting.values()
            for _, pair in entries
            for tensor in pair
        }
        return sum(storages.values())

    def clear(self) -> None:
        """Discard all operands, after an aborted step."""
        self._open = None
        self._waiting.clear()


@runtime_checkable
class DefersWeightGrad(Protocol):
    """A layer that can defer its own weight gradient."""

    def defer_weight_gradient(self) -> WeightGradSite:
        """Hand the weight gradient to the site from now on."""
        ...


def may_defer(parameter: Tensor | None) -> bool:
    """Return True for what a layer may defer the gradient of: its parameter, or none.

    ``torch.func.functional_call`` puts computed tensors in a parameter's place for one call. Autograd makes their gradients.
    """
    return parameter is None or isinstance(parameter, nn.Parameter)


def defer_weight_grad(ticket: Tensor, x: Tensor, dy: Tensor) -> Tensor | None:
    """Make dw of x and dy, now or later, and return the gradient of the ticket; called by a backward."""
    if torch.compiler.is_compiling():
        given: Tensor = torch.ops.meshfold.defer(ticket.detach(), x.detach(), dy.detach())
        return given
    _put(ticket, x, dy)
    return None


def after_gradients(callback: Callable[[], None]) -> None:
    """Call back when the gradients that are being made now are complete; for hooks on parameters.

    That is at the end of the outermost :func:`gradient_scope`, else of the backward that runs.
    """
    if _together:
        _together[0].append(callback)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(callback)


@contextmanager
def gradient_scope() -> Iterator[None]:
    """Context manager around several backwards, nested or in sequence, that make gradients together."""
    callbacks: list[Callable[[], None]] = []
    _together.append(callbacks)
    try:
        yield
    finally:
        _together.pop()
    for callback in callbacks:
        callback()


_together: list[list[Callable[[], None]]] = []  # not thread-local: autograd runs hooks on its own threads


class GradientHook(ABC):
    """Base of hooks for complete gradients that can multiply into a buffer of their own, with no gradient made first."""

    @abstractmethod
    def __call__(self, parameter: Tensor) -> None:
        """Take the gradient in ``parameter.grad``."""

    @abstractmethod
    def add_product(self, left: Tensor, right: Tensor) -> bool:
        """Take ``left @ right`` and return True; return False, with nothing changed, where a whole gradient must come."""


def accumulate_grad(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to ``.grad`` as autograd does, and run the hooks that wait for it. A first gradient is not copied.

    The parameter may be empty at that time: ZeRO stage 3 releases values that are not in use, and dw needs none.
    """
    complete = parameter._post_accumulate_grad_hooks
    if parameter._backward_hooks or (complete and parameter.shape != gradient.shape):
        values = values_of(parameter)
        if values.shape != gradient.shape:  # autograd checks the shape; an expanded scalar satisfies it
            set_values(parameter, values.new_zeros(()).expand(gradient.shape))
        try:
            torch.autograd.backward(parameter, gradient)
        finally:
            if parameter.shape != values.shape:
                set_values(parameter, values)
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    if complete:  # a backward of autograd for one parameter would take the host several times as long
        with torch.no_grad(), nullcontext() if _together else gradient_scope():
            for hook in tuple(complete.values()):
                hook(parameter)


def accumulate_grad_product(parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``.grad``, or where the only hook collects gradients; in one multiplication where possible."""
    complete, grad = parameter._post_accumulate_grad_hooks, parameter.grad
    if complete and not parameter._backward_hooks and grad is None and len(complete) == 1:
        (only,) = complete.values()
        if isinstance(only, GradientHook) and only.add_product(left, right):
            return
    if complete or parameter._backward_hooks or grad is None or grad.dtype != left.dtype:
        accumulate_grad(parameter, (left @ right).to(parameter.dtype))
    else:
        grad.addmm_(left, right)


def _put(ticket: Tensor, x: Tensor, dy: Tensor) -> None:
    _sites[int(ticket)].take(x, dy)


def _forget(ticket: Tensor) -> None:
    ticket.grad = None


@cache
def _operation() -> Any:
    @torch.library.custom_op("meshfold::defer", mutates_args=())
    def defer(ticket: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        # Custom ops run without autograd, but it is needed here to pass dw from the operand to its parameter.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
            _put(ticket, x.clone(), dy.clone())
        return torch.zeros((), dtype=torch.float64)

    @defer.register_fake
    def _(ticket: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        return torch.empty((), dtype=torch.float64)

    return defer
