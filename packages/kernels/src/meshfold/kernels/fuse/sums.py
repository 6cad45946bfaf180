"""Tensors computed only when used: a branch's output, and its sum with the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_ADDS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)


class Waiting:
    """A tensor that waits; any use other than a sum computes it."""

    __slots__ = ()

    def value(self) -> Tensor:
        """Return the tensor."""
        raise NotImplementedError

    def __add__(self, other: Any) -> Any:
        return _sum(self, other)

    def __radd__(self, other: Any) -> Any:
        return _sum(other, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func in _ADDS and len(args) == 2 and not given:
            return _sum(*args)
        return func(*tensors(args), **tensors(given))


def _of_tensor(name: str) -> Callable[..., Any]:
    def operator(me: Waiting, *args: Any) -> Any:
        return getattr(me.value(), name)(*tensors(args))

    return operator


# Python looks operators up in the class.
for _name in (
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "matmul",
    "rmatmul",
    "pow",
    "neg",
    "getitem",
    "len",
    "iter",
):
    setattr(Waiting, f"__{_name}__", _of_tensor(f"__{_name}__"))


class Branch(Waiting):
    """Result of a branch.

    Attributes:
        leaf: the branch's name in its module.
    """

    __slots__ = ("_value", "leaf")

    def __init__(self, value: Tensor, leaf: str) -> None:
        self._value, self.leaf = value, leaf

    def value(self) -> Tensor:
        return self._value


class Sum(Waiting):
    """Residual stream plus branch, which the next norm computes.

    Attributes:
        residual, branch: of one shape, dtype and device; gone once the sum is made.
        leaf: the branch's name in its module.
    """

    __slots__ = ("_value", "_versions", "branch", "leaf", "residual")

    def __init__(self, residual: Tensor, branch: Tensor, leaf: str) -> None:
        self.residual, self.branch, self.leaf = residual, branch, leaf
        self._value: Tensor | None = None
        self._versions = _versions(residual, branch)

    def waits(self) -> bool:
        """Return True until the sum is made."""
        return self._value is None

    def made(self, value: Tensor) -> None:
        """Take the sum.

        Raises:
            RuntimeError: if a tensor it was made of has been changed in place since.
        """
        if self._versions != _versions(self.residual, self.branch):
            raise RuntimeError(
                f"what {self.leaf} returned, or the stream that it was added to, was changed in place before the sum was "
                "read: write kernels=dict(residual=False)"
            )
        self._value = value
        del self.residual, self.branch

    def value(self) -> Tensor:
        if self._value is None:
            self.made(self.residual + self.branch)
        assert self._value is not None
        return self._value


def _sum(one: Any, other: Any) -> Any:
    branch, residual = (one, other) if isinstance(one, Branch) else (other, one)
    residual = tensors(residual)
    if not isinstance(branch, Branch) or type(residual) is not Tensor:
        one, other = tensors((one, other))
        return one + other
    value = branch.value()
    if value.dtype is not residual.dtype or value.shape != residual.shape or value.device != residual.device:
        return residual + value
    return Sum(residual, value, branch.leaf)


def _versions(*each: Tensor) -> list[int]:
    return [-1 if tensor.is_inference() else tensor._version for tensor in each]


def tensors(given: Any) -> Any:
    """Return arguments with waiting tensors computed, also in tuples, lists and dicts."""
    if type(given) is Tensor or given is None:
        return given
    if isinstance(given, Waiting):
        return given.value()
    if type(given) in (tuple, list):
        return type(given)(map(tensors, given))
    return {key: tensors(value) for key, value in given.items()} if type(given) is dict else given


def results(given: Any) -> Any:
    """Return results with waiting tensors computed, in any container."""
    if type(given) is Tensor or given is None:
        return given
    if isinstance(given, Waiting):
        return given.value()
    return tree_map_only(Waiting, lambda each: each.value(), given)
