"""``parameter.grad`` for gradients that are stored elsewhere: in buckets, in chunks, in shards on several ranks.

A :class:`GradientProxy` has a gradient's shape and no memory. torch's own functions that read ``parameter.grad`` work on it
and reach the gradient through its :class:`GradientOwner`::

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)   # the norm over all shards, which is also returned
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    parameter.grad.mul_(0.1)

All ranks must make these calls. What else reads a gradient (``parameter.grad.mean(0)``, ``parameter.grad.clone()``) reads the whole
of it, whatever part of it this rank has. What writes in place works on this rank's block. An operation with another tensor is
refused where the rank has a part only, and everything is where the owner cannot give the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from meshfold.mesh.errors import MeshfoldError

_aten = torch.ops.aten


class GradientOwner(Protocol):
    """Object that stores the gradients by index. Its methods raise if it holds none."""

    def norm(self, places: Sequence[int], norm_type: float) -> Tensor:
        """Return the norm of these gradients over the whole model. All ranks must call."""

    def multiply(self, places: Sequence[int], factor: Tensor | float) -> None:
        """Multiply these gradients in place."""

    def clamp(self, places: Sequence[int], low: float | None, high: float | None) -> None:
        """Bring every element of these gradients into [low, high], in place."""

    def clear(self) -> None:
        """Set gradients to zero, as ``zero_grad(set_to_none=False)`` asks."""

    def local(self, place: int, what: str) -> Tensor:
        """Return this rank's block of a gradient, for what writes in place; raises where it has no such block."""

    def whole(self, place: int, what: str, *, alone: bool) -> Tensor:
        """Return a gradient, whole, for what reads it. All ranks must call.

        Args:
            what: the operation, for errors.
            alone: it reads no other tensor; raises otherwise, if this rank has a part of the gradient.
        """


class _Proxy(Tensor):
    """Tensor without memory, whose operations go to :func:`_run`. It does not keep its owner alive."""

    _of: ref[GradientOwner]
    places: tuple[int, ...]
    """Places of the gradients that it represents"""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def owner(self) -> GradientOwner:
        """Return the object that has the gradient.

        Raises:
            MeshfoldError: if it no longer exists.
        """
        owner = self._of()
        if owner is None:
            raise MeshfoldError(
                "this gradient belonged to an engine that no longer exists: call model.zero_grad() first"
            )
        return owner

    def computed(self, func: str, *, in_place: bool, alone: bool) -> Tensor:
        """Return the tensor that this represents.

        Args:
            func: reads it, for errors.
            in_place: it writes into a tensor.
            alone: it reads no tensor but such as this.
        """
        raise NotImplementedError


class GradientProxy(_Proxy):
    """Stand-in for a parameter's gradient, which its owner stores."""

    @staticmethod
    def of(owner: GradientOwner, place: int, like: Tensor, **other: Any) -> GradientProxy:
        """Return a proxy with a parameter's shape, dtype and device; ``other``: another dtype or device."""
        options = {"dtype": like.dtype, "device": like.device, **other}
        made = torch.Tensor._make_wrapper_subclass(GradientProxy, like.shape, **options)
        made._of, made.places = ref(owner), (place,)
        return made

    def computed(self, func: str, *, in_place: bool, alone: bool) -> Tensor:
        if in_place:
            return self.owner.local(self.places[0], func)
        return self.owner.whole(self.places[0], func, alone=alone)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"GradientProxy(shape={tuple(self.shape)}, dtype={self.dtype})"


class NormProxy(_Proxy):
    """Norms of such gradients, one element each, not computed yet: torch next asks for the norm over all of them.

    So one collective gives the norm over parameters, ranks and the stages of a pipeline, which have other parameters.
    """

    norm_type: float

    @staticmethod
    def of(like: _Proxy, places: Sequence[int], norm_type: float, shape: Sequence[int], **other: Any) -> NormProxy:
        """Return a proxy with the dtype and device of a gradient or another norm; ``other``: another dtype or device."""
        options = {"dtype": like.dtype, "device": like.device, **other}
        made = torch.Tensor._make_wrapper_subclass(NormProxy, shape, **options)
        made._of, made.places, made.norm_type = like._of, tuple(places), norm_type
        return made

    def computed(self, func: str, *, in_place: bool, alone: bool) -> Tensor:
        return self.each()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.each())

    def over_all(self) -> Tensor:
        """Return the norm over all its gradients."""
        return self.owner.norm(self.places, self.norm_type).to(self.device, self.dtype)

    def each(self) -> Tensor:
        """Return each gradient's norm."""
        norms = [self.owner.norm([place], self.norm_type) for place in self.places]
        return torch.stack(norms).reshape(self.shape).to(self.device, self.dtype)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the gradients behind proxies.

    Raises:
        Exception: the owner's, for an operation that it cannot run.
    """
    first = args[0] if args else None
    many = isinstance(first, list | tuple)
    proxies: list[Any] = [*first] if isinstance(first, list | tuple) else [first]
    if proxies and all(isinstance(one, GradientProxy) for one in proxies):
        return _of_gradients(func, proxies, args, kwargs, many=many)
    if proxies and all(isinstance(one, NormProxy) for one in proxies):
        found = _of_norms(func, proxies, args, kwargs)
        if found is not None:
            return found
    return _on_blocks(func, args, kwargs)


def _of_norms(func: Any, proxies: Sequence[NormProxy], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Run an operation that does not need individual norms; return None for any other."""
    first, norm_type = proxies[0], proxies[0].norm_type
    if func in _SAME:
        return first
    if func is _aten._to_copy.default:
        return NormProxy.of(first, first.places, norm_type, first.shape, **_moved(kwargs))
    if func is _aten.stack.default and all(
        one.dim() == 0 and one._of is first._of and one.norm_type == norm_type for one in proxies
    ):
        places = [place for one in proxies for place in one.places]
        return NormProxy.of(first, places, norm_type, (len(proxies),))
    asks_norm = func is _aten.linalg_vector_norm.default and _is_over_all(args, kwargs)
    if asks_norm and _norm_type(args, kwargs) == norm_type:
        return first.over_all()
    return None


def _of_gradients(
    func: Any, proxies: list[GradientProxy], args: tuple[Any, ...], kwargs: dict[str, Any], *, many: bool
) -> Any:
    """Run an operation on gradients; ``many``: it takes lists (torch._foreach)."""
    first, owner, places = proxies[0], proxies[0].owner, [one.places[0] for one in proxies]
    given: Any = args[1] if len(args) > 1 else None
    if func in _NORM and (many or _is_over_all(args, kwargs)):
        wide = torch.promote_types(first.dtype, torch.float32)  # the dtype of summed gradients
        norms = [NormProxy.of(one, one.places, _norm_type(args, kwargs), (), dtype=wide) for one in proxies]
        return norms if many else norms[0]
    if func in (*_MULTIPLY, *_DIVIDE) and _is_number(given):
        owner.multiply(places, 1.0 / given if func in _DIVIDE else given)
    elif func is _aten.clamp_.default:
        owner.clamp(places, *_bounds(*args[1:], **kwargs))
    elif func in _CLAMP_MIN:
        owner.clamp(places, given, None)
    elif func in _CLAMP_MAX:
        owner.clamp(places, None, given)
    elif func in _ZERO:
        owner.clear()
    elif func is _aten._to_copy.default:  # module.to() moves gradients too
        return GradientProxy.of(owner, places[0], first, **_moved(kwargs))
    elif func is _aten.add_.Tensor and torch._C._current_graph_task_id() != -1:
        pass  # another owner's backward reached the parameter: ignore its gradient
    elif func not in _SAME:
        return _on_blocks(func, args, kwargs)
    return None if many else first


def _on_blocks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on gradients, or on this rank's blocks if it writes in place, and on computed norms."""
    first, name = args[0] if args else None, str(func)
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    alone = all(isinstance(one, _Proxy) or one.dim() == 0 for one in given)
    in_place = func._schema.is_mutable

    def computed(one: Any) -> Any:
        return one.computed(name, in_place=in_place, alone=alone) if isinstance(one, _Proxy) else one

    args, kwargs = tree_map(computed, (args, kwargs))
    found = func(*args, **kwargs)
    return first if func._schema.name.endswith("_") and isinstance(first, _Proxy) else found


_MULTIPLY = (
    _aten.mul_.Tensor,
    _aten.mul_.Scalar,
    _aten._foreach_mul_.Tensor,
    _aten._foreach_mul_.Scalar,
)
_DIVIDE = (
    _aten.div_.Tensor,
    _aten.div_.Scalar,
    _aten._foreach_div_.Tensor,
    _aten._foreach_div_.Scalar,
)
_SAME = (_aten.detach.default, _aten.alias.default)
_NORM = (_aten.linalg_vector_norm.default, _aten.norm.Scalar, _aten._foreach_norm.Scalar)
_CLAMP_MIN = (_aten.clamp_min_.default, _aten._foreach_clamp_min_.Scalar)
_CLAMP_MAX = (_aten.clamp_max_.default, _aten._foreach_clamp_max_.Scalar)
_ZERO = (_aten.zero_.default, _aten._foreach_zero_.default)


def _is_number(value: Any) -> bool:
    return not isinstance(value, _Proxy | list | tuple) and (not isinstance(value, Tensor) or value.dim() == 0)


def _bounds(low: float | None = None, high: float | None = None, **named: Any) -> tuple[Any, Any]:
    return named.get("min", low), named.get("max", high)


def _norm_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    given = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2.0))
    return 2.0 if given is None else float(given)


def _is_over_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a norm is over all dims and returns a scalar."""
    return len(args) <= 2 and not any(kwargs.get(name) for name in ("dim", "keepdim"))


def _moved(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
