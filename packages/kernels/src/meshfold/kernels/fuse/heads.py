"""Heads whose logits wait for their loss: a called layer returns a stand-in, and runs when the loss is computed.

    logits = model.head(x)                                # LazyLogits: x, and which head
    F.cross_entropy(logits.float().view(-1, v), labels)   # linear_cross_entropy(x, head.weight, labels)

The head is *called* only when the loss is computed. Hooks on it, such as hooks that gather its weights, thus run around the
computation that needs them. A user's own hook on its output makes the logits be computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from meshfold.kernels.fuse.logits import LazyLogits, Operands, in_backward
from meshfold.kernels.fuse.replaced import candidates, is_ours, own_forward, watcher
from meshfold.kernels.fuse.split_rows import SplitRows
from meshfold.kernels.inputs import is_autocast
from meshfold.kernels.logit_chunks import VocabularyShard

WORTHWHILE = 1 << 24
"""Least number of logits that are left out: 64 MiB in float32. Fewer are computed at once, as usual."""

_CALL = "_meshfold_head"


class DeferredLogits:
    """The heads of a model whose logits may wait, and when they do.

    Attributes:
        heads: the heads.
    """

    def __init__(self, heads: list[Head]) -> None:
        self.heads = heads

    @contextmanager
    def waiting(self, *, until_expired: bool = False) -> Iterator[None]:
        """Context manager: logits that are made inside wait for their loss.

        Args:
            until_expired: outside they can be read until :meth:`expire` is called. Without it they cannot be read outside: that is
                an error, because weights may have changed.
        """
        for head in self.heads:
            head.open += 1
            head.kept += until_expired
        try:
            yield
        finally:
            for head in self.heads:
                head.open -= 1
                head.kept -= until_expired
            if not until_expired and not any(head.open for head in self.heads):
                for head in self.heads:
                    head.ended += 1

    def expire(self) -> None:
        """Let no logits be read any more that were not computed until now, because weights change."""
        for head in self.heads:
            head.closed += 1


def defer_logits(model: nn.Module, *, always: bool) -> DeferredLogits:
    """Find the heads of a model: linear layers with an output for each row of an embedding table, and those that say so."""
    rows = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}

    def makes_logits(module: nn.Module) -> bool:
        if isinstance(module, DeferrableHead):
            return module.makes_logits
        return _is_linear(module) and module.out_features in rows

    def is_here(module: nn.Module) -> bool:
        """Return False for a head in another rank's pipeline stage, which exists here only by name."""
        return isinstance(module._parameters.get("weight"), nn.Parameter)

    heads = [
        Head(name, module, always)
        for name, module in candidates(model)
        if own_forward(module) and makes_logits(module) and is_here(module)
    ]
    return DeferredLogits(heads)


def leaves_out_logits(layer: nn.Module) -> bool:
    """Return True if a layer is a head whose losses were all computed without whole logits; False before the first."""
    head = layer.__dict__.get(_CALL)
    return isinstance(head, Head) and head.losses > 0 and not head.reads


def _is_hooked(layer: nn.Module) -> bool:
    """Return True if a hook of a user's gets a layer's output, or its gradient: those must be logits, and not their loss."""
    hooks = (layer._forward_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(not is_ours(hook) for each in hooks for hook in each.values())


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True for ``nn.Linear``, and for a pipeline's subclass with ``computes_linear``."""
    return type(module) is nn.Linear or (
        isinstance(module, nn.Linear) and getattr(type(module), "computes_linear", False)
    )


@runtime_checkable
class DeferrableHead(Protocol):
    """A layer of another kind than ``nn.Linear`` whose logits may wait, such as one that is split over ranks."""

    @property
    def makes_logits(self) -> bool:
        """Tell whether the layer is a head."""

    def defers_logits(self) -> bool:
        """Return True if the logits of this call may wait."""

    def logits_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the output for an input."""

    def loss_operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return rows ``m k``, weight ``v k`` and bias ``v`` whose product the logits are, each with its gradient."""

    def gathered_words(self) -> VocabularyShard | None:
        """Return this rank's words if the output of this call is gathered, so that every rank has all of them; else None."""

    def gathered_rows(self, x: Tensor) -> SplitRows | None:
        """Return the rows of logits of ``x`` if this call gathers rows, too, of which ranks have different ones; else None."""

    def meet_to_read(self, name: str) -> None:
        """Wait until all ranks read logits that are gathered; raise an error if some do not; ``name``: of the layer."""

    def meet_for_loss(self, name: str, rows: int) -> None:
        """Wait until all ranks compute a loss of so many rows of gathered logits, as :meth:`meet_to_read`."""


class Head:
    """A linear layer whose logits may wait.

    Attributes:
        name: of the layer in its model.
        open: number of open contexts in which its logits wait.
        kept: how many of these leave logits to code that may read them on some ranks only.
        closed: number of times that logits made before could no longer be read.
        ended: number of times that they could be read in a backward only, which computes again what a user checkpoints.
        losses: number of losses that were computed with the layer.
        reads: number of logits that waited, and were computed all the same.
    """

    def __init__(self, name: str, layer: Any, always: bool) -> None:
        self.name, self.open, self.kept, self.closed, self.ended = name, 0, 0, 0, 0
        self._called = (0, 0)  # open and kept in the last call outside of a backward, which may call it again
        self.losses = self.reads = 0
        self._layer, self._always = layer, always
        # Asked once: a look whether a class has a protocol takes the host as long as a launch.
        self._deferrable = layer if isinstance(layer, DeferrableHead) else None
        self._kind = type(layer)
        self._loss: Callable[[Tensor], Tensor] | None = None  # set while the layer computes its own loss
        layer.__dict__[_CALL] = self
        layer.__class__ = _deferring(self._kind)

    def close(self) -> None:
        """Restore the layer."""
        self._layer.__class__ = self._kind
        self._layer.__dict__.pop(_CALL, None)

    def waits(self, x: object) -> bool:
        """Return True if the logits of ``x`` are to wait."""
        if not in_backward():
            self._called = (self.open, self.kept)
        now_open, kept = self._called
        if not now_open or type(x) is not Tensor or torch.compiler.is_compiling():
            return False
        if x.ndim < 2 or is_autocast(x) or _is_hooked(self._layer):
            return False
        if self._deferrable is not None and not self._deferrable.defers_logits():
            return False
        if kept and self.gathered_words() is not None:
            return False  # reading what is gathered takes all ranks
        return self._always or math.prod(self.shape(x)) >= WORTHWHILE

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the logits of ``x``."""
        if self._deferrable is not None:
            return self._deferrable.logits_shape(x)
        return (*x.shape[:-1], self._layer.out_features)

    def operands(self, x: Tensor) -> Operands:
        """Return rows ``m k``, weight ``v k`` and bias ``v`` whose product the logits are; only within :meth:`loss`."""
        if self._deferrable is not None:
            return self._deferrable.loss_operands(x)
        return x.reshape(-1, x.shape[-1]), self._layer.weight, self._layer.bias

    @property
    def layer(self) -> Any:
        """The layer."""
        return self._layer

    @property
    def trains(self) -> bool:
        """Tell whether the layer's weight has a gradient."""
        return bool(self._layer.weight.requires_grad)

    @property
    def is_followed(self) -> bool:
        """True while a mode looks at what is done with the logits of a layer that is split over ranks: their loss may be wrong."""
        watched = None if self._deferrable is None or self.gathered_words() is not None else watcher()
        return watched is not None and not watched.is_off

    def gathered_words(self) -> VocabularyShard | None:
        """Return this rank's words of logits that the layer gathers; None if it does not."""
        return None if self._deferrable is None else self._deferrable.gathered_words()

    @property
    def marks_logits(self) -> bool:
        """Tell whether the layer's own hooks say how its logits lie."""
        return self._deferrable is not None

    def stand_in(self, x: Tensor) -> LazyLogits | None:
        """Return the logits of ``x``, which are computed when they are needed; None if they must be computed at once."""
        shape, watched = self.shape(x), watcher()
        layout = () if watched is None else watched.layout_later(self._layer, x, shape)
        if layout is None:
            return None
        split = None if self._deferrable is None else self._deferrable.gathered_rows(x)
        if split is not None and watched is not None and layout:
            watched.gathered_later(self._layer, x, split.numbers, layout)
        made = LazyLogits.make(self, x, shape, self._layer.weight.dtype, (), layout, split=split)
        if split is None and watched is not None and shape[:-1] == x.shape[:-1] and watched.moves_rows(x, layout):
            made.moved = torch.arange(math.prod(shape[:-1]), device=x.device).view(*shape[:-1], 1)
            watched.gathered_later(self._layer, x, made.moved, layout)
        return made

    def read(self, x: Tensor) -> Tensor:
        """Return the logits of ``x``, which waited; all ranks must call if the layer gathers them."""
        self.reads += 1
        if self._deferrable is not None and self._deferrable.gathered_words() is not None:
            self._deferrable.meet_to_read(self.name)
        return self.logits(x)

    def meet_for_loss(self, rows: int) -> None:
        """Wait until all ranks compute a loss of so many rows, if the layer gathers its logits."""
        if self._deferrable is not None and self._deferrable.gathered_words() is not None:
            self._deferrable.meet_for_loss(self.name, rows)

    def logits(self, x: Tensor) -> Tensor:
        """Return what the layer makes of ``x``."""
        found: Tensor = self._kind.__call__(self._layer, x)
        return found

    def loss(self, x: Tensor, loss: Callable[[Operands], Tensor]) -> Tensor:
        """Call the layer on ``x`` for a loss: ``loss(operands)`` is run as the layer's forward, between its hooks."""
        self.losses += 1
        self._loss = lambda rows: loss(self.operands(rows))
        try:
            return self.logits(x)
        finally:
            self._loss = None

    def forward(self, layer: Any, x: Tensor) -> Tensor:
        """Run the layer's forward, or the loss that it is called for."""
        return self._kind.forward(layer, x) if self._loss is None else self._loss(x)


_kinds: dict[type, type] = {}


def _deferring(kind: type[nn.Module]) -> type:
    """Return a subclass whose calls may be deferred, with the same name, module and other behaviour."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        head: Head = self.__dict__[_CALL]
        if len(args) == 1 and not kwargs and head.waits(args[0]) and (found := head.stand_in(args[0])) is not None:
            return found
        return kind.__call__(self, *args, **kwargs)

    def forward(self: Any, input: Tensor) -> Tensor:
        head: Head = self.__dict__[_CALL]
        return head.forward(self, input)

    if kind not in _kinds:
        body = dict(__call__=call, forward=forward, __module__=kind.__module__, __qualname__=kind.__qualname__)
        _kinds[kind] = type(kind.__name__, (kind,), body)
    return _kinds[kind]
