"""Residual add and norm: ``x = x + branch(...); y = norm(x)`` inside of one module's forward, where branch and norm are children.

The forward's own code runs on a view of the module, and its children do two more things. The output of a branch waits for the sum
that it is added to. A norm of such a sum computes the sum in its own kernel. Any other use of the sum gets it as a tensor. Hooks of
the children, and callers of the module, see only tensors.

A trial finds the children that are branches and norms: the forward runs on small random tensors with cheap other children, once
unchanged and once with sums that wait. Results and gradients must be equal.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshfold.kernels.fp8_inputs import FP8_SOURCE
from meshfold.kernels.fuse.norms import Norm, runs_norm
from meshfold.kernels.fuse.replaced import ReplacedForward, candidates, is_compiled, runs_fused, settings_of
from meshfold.kernels.fuse.sums import Branch, Sum, results, tensors

Call = Callable[..., Any]
_LENGTHS = (0, 2, 3, 1)  # lengths of a composite child's result: a tensor, or a tuple that begins with one
_MOST_COMPOSITES = 3
_top_hooks: Call = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


class _Call:
    """Call of a module's forward, in which residual sums are deferred.

    Attributes:
        branches: children whose result may be added to the stream; None: all.
        norms: children that may compute the sum.
        made: branch and norm of each sum that a norm has computed.
        module: whose forward runs.
    """

    def __init__(self, branches: frozenset[str] | None, norms: Mapping[str, Norm]) -> None:
        self.branches, self.norms = branches, norms
        self.made: list[tuple[str, str]] = []
        self.module: nn.Module | None = None
        self._around = self._mode()
        self.defers, self._over = False, False  # whether a branch has returned, and whether the forward has

    def run(self, module: nn.Module, forward: Call, children: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
        """Run a forward on a view of its module with these children."""
        self.module = module
        view = object.__new__(type(module))
        before = {**module.__dict__, "_modules": {leaf: _Child(leaf, each, self) for leaf, each in children.items()}}
        before["_modules"].update({leaf: None for leaf, each in module._modules.items() if each is None})
        view.__dict__ = dict(before)
        if kwargs:
            kwargs = tensors(kwargs)
        try:
            return results(forward(view, *map(tensors, args), **kwargs))
        finally:
            self._over = True
            for name, value in view.__dict__.items():
                if before.get(name, before) is not value:
                    module.__dict__[name] = results(value)

    def waits(self) -> bool:
        """Return False inside recomputation of activations and its first forward: both must return and save the same tensors."""
        return not self._over and self._mode() == self._around

    def _mode(self) -> tuple[bool, Any]:
        return torch.is_grad_enabled(), _top_hooks(True)


class _Child:
    """A child of a module in its forward."""

    __slots__ = ("_call", "_child", "_leaf")

    def __init__(self, leaf: str, child: Any, call: _Call) -> None:
        self._leaf, self._child, self._call = leaf, child, call

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._child.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    def __getitem__(self, key: Any) -> Any:
        return self._child[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._child)

    def __len__(self) -> int:
        return len(self._child)

    def __bool__(self) -> bool:
        return bool(self._child)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaf, call, child = self._leaf, self._call, self._child
        result: Any
        norm = call.norms.get(leaf)
        alone = len(args) == 1 and not kwargs
        if norm is not None and alone and _makes_sum(call.module, child, norm, args[0]) and call.waits():
            source = child.__dict__.get(FP8_SOURCE)
            result, value = norm.of_sum(args[0].branch, args[0].residual, child._parameters, source)
            args[0].made(value)
            call.made.append((args[0].leaf, leaf))
        elif call.defers:
            result = child(*map(tensors, args), **(tensors(kwargs) if kwargs else kwargs))
        else:  # nothing waits before the first branch has returned
            result = child(*args, **kwargs)
        if (call.branches is not None and leaf not in call.branches) or not call.waits():
            return result
        call.defers = True
        if type(result) is tuple and result and type(result[0]) is Tensor:
            return (Branch(result[0], leaf), *result[1:])
        return Branch(result, leaf) if type(result) is Tensor else result


def _makes_sum(module: nn.Module | None, child: nn.Module, norm: Norm, x: Any) -> bool:
    if not isinstance(x, Sum) or not x.waits() or not norm.takes(x.branch, child._parameters):
        return False
    hooks = (child._forward_pre_hooks, child._forward_hooks, child._backward_hooks, child._backward_pre_hooks)
    # Hooks, compiled modules, and a forward that others have put into the module must see the call.
    hooked = any(not _is_idle(hook, child, module) for each in hooks for hook in each.values())
    return not hooked and not is_compiled(child) and runs_norm(child)


def _is_idle(hook: Any, child: nn.Module, module: nn.Module | None) -> bool:
    """Return True for a hook that says that it does nothing in a module's calls of its child: ``idle_within(child, module)``.

    Sharded parameters have one on every submodule, for calls past the block that they are gathered for.
    """
    asks: Callable[[nn.Module, nn.Module], bool] | None = getattr(hook, "idle_within", None)
    return module is not None and asks is not None and asks(child, module)


def fuse_residuals(
    model: nn.Module, norms: Mapping[nn.Module, Norm], *, always: bool
) -> tuple[list[ReplacedForward], tuple[str, ...]]:
    """Let norms inside of a model's blocks make the sum that they are given; see :func:`meshfold.kernels.fuse.fuse`.

    Args:
        model: with the replacements of other rules.
        norms: those of the model.

    Returns:
        The replacements, in the blocks, and the names of the norms.
    """
    tried: dict[Any, tuple[frozenset[str], dict[str, Norm]] | None] = {}
    found: list[ReplacedForward] = []
    names: list[str] = []
    for name, module in candidates(model):
        mine = {leaf: norms[child] for leaf, child in module.named_children() if child in norms}
        forward = _function(module)
        if not mine or forward is None or type(module).__module__.startswith("torch."):
            continue
        kind = (settings_of(module), forward.__code__, tuple(module._modules), tuple(mine.items()))
        if kind not in tried:
            tried[kind] = _trial(module, forward, mine)
        chosen = tried[kind]
        if chosen is not None:
            replaced: Any = partial(
                _forward, module, forward, *chosen, always
            )  # partial: a deep copy then refers to the copied module
            replaced.__signature__ = inspect.signature(types.MethodType(forward, module))
            found.append(ReplacedForward(name, module, replaced))
            names += [f"{name}.{leaf}" if name else leaf for leaf in chosen[1]]
    return found, tuple(names)


def _function(module: nn.Module) -> Any:
    """Return a module's forward as a function of ``self``: its class's, or another fusion's copy of that; else None."""
    replaced: Any = module.__dict__.get("forward")
    if replaced is None:
        forward: Any = type(module).forward
        return forward if isinstance(forward, types.FunctionType) else None
    bound = isinstance(replaced, types.MethodType) and replaced.__self__ is module
    return replaced.__func__ if bound and replaced.__func__.__name__ == "forward" else None


def _forward(
    module: nn.Module,
    forward: Call,
    branches: frozenset[str],
    norms: Mapping[str, Norm],
    always: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    first = args[0] if args else None
    if not isinstance(first, Tensor):
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
    checkpoints = module.training and getattr(module, "gradient_checkpointing", False)
    if first is None or not runs_fused(first, always) or checkpoints:
        return forward(module, *args, **kwargs)
    children = {leaf: child for leaf, child in module._modules.items() if child is not None}
    return _Call(branches, norms).run(module, forward, children, args, kwargs)


# Trials.


def _trial(module: nn.Module, forward: Any, norms: Mapping[str, Norm]) -> tuple[frozenset[str], dict[str, Norm]] | None:
    """Return branches and norms of a module whose forward adds a branch to its stream and passes the sum to a norm; else None."""
    random = torch.Generator().manual_seed(0)
    own = {leaf: child for leaf, child in module._modules.items() if child is not None}
    composites = [leaf for leaf, child in own.items() if leaf not in norms and any(True for _ in child.children())]
    if len(composites) > _MOST_COMPOSITES:
        return None
    first = next(iter(norms))
    hidden = own[first].get_parameter(norms[first].weight).shape[0]
    for lengths, inputs in product(product(_LENGTHS, repeat=len(composites)), _inputs(forward, hidden, random)):
        length = dict(zip(composites, lengths, strict=True))
        children: dict[str, Any] = {
            leaf: _TriedNorm(child, random) if leaf in norms else _Cheap(child, length.get(leaf, 0), number)
            for number, (leaf, child) in enumerate(own.items())
        }
        try:
            want, _ = _tried(_Call(frozenset(), {}), module, forward, children, inputs)
            _, noted = _tried(_Call(None, norms), module, forward, children, inputs)
            branches = frozenset(leaf for leaf, _ in noted)
            made_by = {leaf: norms[leaf] for _, leaf in noted}
            got, made = _tried(_Call(branches, made_by), module, forward, children, inputs)
        except Exception:  # needs its weights, or other inputs: unknown
            continue
        if made and set(made) == set(noted) and _equal(got, want):
            return branches, made_by
    return None


def _tried(call: _Call, module: nn.Module, forward: Call, children: Mapping[str, Any], inputs: list[Any]) -> Any:
    """Run a forward in eval mode; return its results with gradients, and the sums that norms computed."""
    trial = object.__new__(type(module))
    buffers = {name: buffer if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    trial.__dict__ = {**module.__dict__, "training": False, "_buffers": buffers}
    with torch.enable_grad():
        leaves = [each if each is None else each.clone().requires_grad_() for each in inputs]
        found = call.run(trial, forward, children, leaves, {})
        flat = [each for each in (found if isinstance(found, tuple) else (found,)) if isinstance(each, Tensor)]
        loss = torch.stack([(each * torch.cos(each.detach())).sum() for each in flat]).sum()
        wanted = [each for each in leaves if each is not None]
        return (found, torch.autograd.grad(loss, wanted, allow_unused=True)), call.made


def _inputs(forward: Any, hidden: int, random: torch.Generator) -> Iterator[list[Any]]:
    """Yield trial arguments: rows for the first; for others without a default, first None, then rows."""
    parameters = [p for p in inspect.signature(forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    wanted = sum(p.default is p.empty for p in parameters)
    rows = [torch.randn(2, 3, hidden, generator=random) for _ in range(max(wanted, 1))]
    yield [rows[0], *[None] * (len(rows) - 1)]
    if wanted > 1:
        yield [*rows]


def _equal(got: Any, want: Any) -> bool:
    """Return True if tensors, or tuples of them, are equal up to rounding."""
    if isinstance(want, tuple):
        return type(got) is tuple and len(got) == len(want) and all(map(_equal, got, want))
    if isinstance(want, Tensor):
        return type(got) is Tensor and got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    return want is None and got is None


class _TriedNorm(nn.Module):
    """Norm with trial weights that computes as its module does."""

    def __init__(self, module: nn.Module, random: torch.Generator) -> None:
        super().__init__()
        self._own = (module,)
        for name, parameter in module._parameters.items():
            made = None if parameter is None else nn.Parameter(torch.rand(parameter.shape, generator=random) + 0.5)
            self.register_parameter(name, made)

    def forward(self, x: Tensor) -> Tensor:
        given: dict[str, Tensor] = {name: p for name, p in self._parameters.items() if p is not None}
        result: Tensor = functional_call(self._own[0], given, (x,))
        return result


class _Cheap:
    """Stand-in for another child: a cheap function of its first tensor, with the output size of a linear layer."""

    def __init__(self, child: nn.Module, length: int, number: int) -> None:
        self._kind, self._out = type(child), getattr(child, "out_features", None)
        self._length, self._number = length, number

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        out = x.shape[-1] if self._out is None else self._out
        y = x.mean(-1, keepdim=True) + torch.sin(torch.arange(out, dtype=x.dtype) + self._number)
        y = y + 0.5 * x.roll(1, -1) if out == x.shape[-1] else y
        return (y, *[None] * (self._length - 1)) if self._length else y
