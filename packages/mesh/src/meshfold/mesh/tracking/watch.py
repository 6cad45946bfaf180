"""Tracked forwards: the first of each kind of call. All others run untracked.

Calls are of one kind if they have the same arguments, dtypes and numbers of dims, in the same state (training or not, with
gradients or not).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from meshfold.mesh.parameters.parameter_meta import uncompiled_name
from meshfold.mesh.parameters.weight_writes import OWN_KINDS
from meshfold.mesh.tracking.active import activated, is_tracking_on, part
from meshfold.mesh.tracking.dims import Dims, is_whole, unknown, unknown_dims, whole, whole_dims
from meshfold.mesh.tracking.follow import Tracker
from meshfold.mesh.tracking.repeated import repeated_alike
from meshfold.mesh.tracking.sizes import OpenSizes
from meshfold.mesh.tracking.uncompiled import uncompiled

_TRACKING = "_meshfold_watch"


class TrackingHooks(Protocol):
    """Callbacks that tell the tracker what the code that splits a model has split."""

    def begin(self, tracker: Tracker, model: nn.Module, given: Mapping[str, Any]) -> None:
        """Begin a forward that is tracked, with these arguments by name or number."""

    def parameter_dims(self, parameter: Tensor) -> Dims | None:
        """Return the layout of a parameter of the forward that has begun; None if it is whole on every rank."""

    def reads_shapes(self, module: nn.Module) -> bool:
        """Return True if a module reads nothing but the shape of a floating-point input."""

    def communicates(self, module: nn.Module) -> bool:
        """Return True if a module's own code may communicate between ranks, so that it is not tracked."""

    def check_arguments(
        self, tracker: Tracker, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse arguments that such a module cannot take, before it runs."""

    def mark_results(
        self,
        tracker: Tracker,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        """Mark the layouts of such a module's results, before its own hooks run."""

    def made_later(self, tracker: Tracker, module: nn.Module, given: Tensor, shape: tuple[int, ...]) -> Dims | None:
        """Return the layout of a result of a shape that such a module will make later; None if it must make it at once."""

    def summed_later(self, tracker: Tracker, module: nn.Module, given: Tensor, layout: Dims) -> Iterable[str]:
        """Return the axes along which ranks have parts of the gradient of such a result, which the module sums."""

    def remedy(self, name: str, axes: tuple[str, ...]) -> str:
        """Return what to write instead of code that mixes pieces over these axes, in a module of this name; empty if unknown."""


def track_forwards(model: nn.Module, hooks: TrackingHooks) -> Callable[[], None]:
    """Track the first forward of each kind from now on.

    Returns:
        A function that undoes it.
    """
    found: ForwardTracking | None = model.__dict__.get(_TRACKING)
    if found is None:
        found = model.__dict__[_TRACKING] = ForwardTracking()
        found.attach(model)
    found.hooks.append(hooks)
    found.seen.clear()

    def undo() -> None:
        if hooks in found.hooks:
            found.hooks.remove(hooks)
            if not found.hooks:
                found.remove()
                model.__dict__.pop(_TRACKING, None)

    return undo


class ForwardTracking:
    """The hooks before and after a model's forward.

    Attributes:
        hooks: the callbacks of each way in which the model is split.
        seen: the kinds of call that have been tracked.
    """

    def __init__(self) -> None:
        self.hooks: list[TrackingHooks] = []
        self.seen: set[object] = set()
        self._handles: list[Any] = []
        self._tracked: ExitStack | None = None
        self._kind: object = None

    def attach(self, model: nn.Module) -> None:
        """Register the hooks before existing ones."""
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        kind = (
            part(),
            model.training,
            torch.is_grad_enabled(),
            tuple(map(_kind, args)),
            tuple((name, _kind(value)) for name, value in kwargs.items()),
        )
        if kind in self.seen or self._tracked is not None or not is_tracking_on() or _has_no_values(args, kwargs):
            return
        self._kind = kind
        given = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        self._tracked = ExitStack()
        self._tracked.enter_context(TrackedForward(model, tuple(self.hooks), given))

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._tracked is None or torch.compiler.is_compiling():
            return
        tracked, self._tracked = self._tracked, None
        tracked.close()
        error = sys.exc_info()[1]
        if error is None or getattr(error, "ends_forward", False):
            self.seen.add(self._kind)


def _has_no_values(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True for a forward on meta tensors, as in a plan."""
    return any(isinstance(value, Tensor) and value.is_meta for value in (*args, *kwargs.values()))


def _kind(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    if value is None or isinstance(value, bool | str):
        return value
    return type(value)


def _made_later(
    hooks: Sequence[TrackingHooks], tracker: Tracker, head: nn.Module, x: Tensor, shape: tuple[int, ...]
) -> Dims | None:
    """Return the layout of the logits that a head will make. A method would keep the model, by a circle with the tracker."""
    for each in hooks:
        if each.communicates(head):
            return each.made_later(tracker, head, x, shape)
    dims = tracker.dims(x)
    return (*dims[:-1], whole(shape[-1])) if is_whole(dims[-1]) else None


def _summed_later(
    hooks: Sequence[TrackingHooks], tracker: Tracker, head: nn.Module, x: Tensor, layout: Dims
) -> Iterable[str]:
    """Return the axes along which ranks have parts of the gradient of the logits that a head will make."""
    return next((each.summed_later(tracker, head, x, layout) for each in hooks if each.communicates(head)), ())


_DEEP = 6
"""Levels of nesting to which tensors are looked for in other arguments, such as caches"""
_PLAIN, _MODELS = ("builtins", "torch", "collections", "meshfold."), "meshfold.models"
"""Packages whose objects in modules are no caches; our own models have caches."""


class TrackedForward:
    """Context of one tracked forward, from its first hook to its last."""

    def __init__(self, model: nn.Module, hooks: Sequence[TrackingHooks], given: Mapping[str, Any]) -> None:
        self._model, self._hooks, self._given = model, hooks, given
        self._running = running = _RunningModules(model, hooks)
        self._tracker = Tracker(
            module=running.where,
            remedy=running.remedy,
            parameter_dims=running.parameter_dims,
            reads_shapes=lambda module: any(one.reads_shapes(module) for one in hooks),
            made_later=partial(_made_later, hooks),
            summed_later=partial(_summed_later, hooks),
        )
        self._untracked: AbstractContextManager[Any] = nullcontext()  # around a module that communicates
        self._open = ExitStack()

    def __enter__(self) -> Self:
        tracker = self._tracker
        # Skip placeholders of other stages' parameters, which must not be read.
        tracker.records.vary(p for p in self._model.parameters() if type(p) in OWN_KINDS)
        for value in self._given.values():
            tracker.records.vary(_tensors(value, _DEEP, set()))
        for value in (*self._given.values(), *_objects(self._model)):
            for tensor in _kept_in(value, _DEEP, set()):
                tracker.mark(tensor, _cached(tensor) if _is_cache(value) else unknown_dims(tensor.shape))
        with ExitStack() as stack:
            stack.enter_context(uncompiled())
            stack.enter_context(repeated_alike())
            stack.enter_context(activated(tracker))
            stack.enter_context(OpenSizes(tracker))
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, with_kwargs=True),
                register_module_forward_hook(self._left, always_call=True),
            ):
                stack.callback(handle.remove)
                # torch forgets this one, and torch.compile would warn of global hooks from then on
                stack.callback(_global_forward_hooks_with_kwargs.pop, handle.id, None)
            for module in self._model.modules():
                if any(hooks.communicates(module) for hooks in self._hooks):
                    # The module's last hook, which sees the arguments that the other hooks return.
                    handle = module.register_forward_pre_hook(self._given_to, with_kwargs=True)
                    stack.callback(handle.remove)
            for hooks in self._hooks:
                hooks.begin(tracker, self._model, self._given)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._running.enter(module):
            self._untracked = self._tracker.untracked()
            self._untracked.__enter__()

    def _given_to(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for hooks in self._hooks:
            if hooks.communicates(module):
                hooks.check_arguments(self._tracker, module, args, kwargs)
                return

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._ended(module) or self._tracker.makes_loss:
            return
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        first = output[0] if isinstance(output, tuple) and output else output
        if given is not None and isinstance(first, Tensor):
            self._tracker.rows.keep(first, given)
        for hooks in self._hooks:
            if hooks.communicates(module):
                hooks.mark_results(self._tracker, module, args, kwargs, output)
                return

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the end of a module's forward, also by an exception that the model may catch."""
        self._ended(module)

    def _ended(self, module: nn.Module) -> bool:
        """Record that a module's forward ended; return True if the module may communicate."""
        communicates = self._running.leave(module)
        if communicates:
            self._untracked.__exit__(None, None, None)
        return communicates


class _RunningModules:
    """The modules whose forwards run, and what is known about them and their parameters."""

    def __init__(self, model: nn.Module, hooks: Sequence[TrackingHooks]) -> None:
        self._hooks = hooks
        self._names = {id(module): uncompiled_name(name) for name, module in model.named_modules()}
        self._inside: list[nn.Module] = []
        self._exchanging: nn.Module | None = None  # the outermost one that communicates

    def enter(self, module: nn.Module) -> bool:
        """Record the start of a module's forward; return True if it communicates and none around it does."""
        self._inside.append(module)
        if self._exchanging is not None or not any(hooks.communicates(module) for hooks in self._hooks):
            return False
        self._exchanging = module
        return True

    def leave(self, module: nn.Module) -> bool:
        """Record the end of a module's forward, and of those inside; return True for one whose start has returned True."""
        if module in self._inside:
            del self._inside[len(self._inside) - 1 - self._inside[::-1].index(module) :]
        if self._exchanging is not module:
            return False
        self._exchanging = None
        return True

    def where(self) -> str:
        """Return the running module."""
        for module in reversed(self._own()):
            if id(module) in self._names:
                return f"{self._names[id(module)] or '(root)'} ({type(module).__name__})"
        return ""

    def remedy(self, axes: tuple[str, ...]) -> str:
        """Return what to write instead where tensors of these axes are mixed; empty if nothing is known."""
        name = next((self._names[id(m)] for m in reversed(self._own()) if id(m) in self._names), "")
        found = (hooks.remedy(name, axes) for hooks in self._hooks)
        return next((text for text in found if text), "")

    def parameter_dims(self, parameter: Tensor) -> Dims | None:
        """Return the layout of a parameter that is sharded; None for one that is whole."""
        found = (hooks.parameter_dims(parameter) for hooks in self._hooks)
        return next((dims for dims in found if dims is not None), None)

    def _own(self) -> list[nn.Module]:
        """Return the running modules up to the first of ours, whose caller is the model's code."""
        return self._inside if self._exchanging is None else self._inside[: self._inside.index(self._exchanging)]


def _objects(model: nn.Module) -> Iterator[Any]:
    """Yield other attributes of modules: not parameters, buffers, submodules or tensors, but caches and the like."""
    for module in model.modules():
        for value in module.__dict__.values():
            if not type(value).__module__.startswith(_PLAIN) or type(value).__module__.startswith(_MODELS):
                yield value


def _is_cache(value: Any) -> bool:
    """Return True for a cache of keys and values."""
    return type(value).__module__.startswith(("transformers.", _MODELS))


def _cached(tensor: Tensor) -> Dims:
    """Return the layout of cached keys or values ``.. b heads s d``: any rows and heads, whole tokens and features."""
    if tensor.dim() < 4:
        return unknown_dims(tensor.shape)
    *more, rows, heads, tokens, size = tensor.shape
    return (*whole_dims(more), unknown(rows), unknown(heads), whole(tokens), whole(size))


def _kept_in(value: Any, deep: int, seen: set[int]) -> list[Tensor]:
    """Return the tensors inside an argument that is not a tensor."""
    if isinstance(value, Tensor) or value is None or isinstance(value, int | float | str | bytes | type | nn.Module):
        return []
    return _tensors(value, deep, seen)


def _tensors(value: Any, deep: int, seen: set[int]) -> list[Tensor]:
    if type(value) is Tensor:
        return [value]
    if deep == 0 or id(value) in seen or isinstance(value, Tensor | nn.Module):
        return []
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner: list[Any] = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    return [tensor for item in inner for tensor in _tensors(item, deep - 1, seen)]
