"""Recording of a model's initialisation, without computing a value.

Under :class:`Recorder` every factory makes a tensor on the meta device, and every write into such a tensor is noted in the list
that belongs to its storage (:mod:`meshfold.mesh.initialization.writes`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from meshfold.mesh.errors import MeshfoldError
from meshfold.mesh.initialization.writes import META, TARGET, TRUNCATED_NORMAL, Recording

_READERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


class Recorder(TorchDispatchMode):
    """Redirects factories to the meta device and records writes into meta tensors.

    Args:
        recording: receives the writes.
        value: computes a recorded tensor, for a builder that reads one (``.item()``, a branch on a comparison).
    """

    def __init__(self, recording: Recording, value: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._recording = recording
        self._value = value

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports the compiler to keep it out of this mode, which takes most of a second."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunction():  # do not enter Reader again
            return self._record(func, args, dict(kwargs or {}))

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = _tensors((*args, *kwargs.values()))
        operator = _operator(func)
        factory = not tensors and operator.takes_device
        if not factory and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        written = operator.written(args, kwargs)
        if any(not tensor.is_meta for tensor in written) or not operator.makes_tensors:
            return self._compute(func, args, kwargs)
        if factory or kwargs.get("device") is not None:
            kwargs["device"] = META
        for name in ("pin_memory", "generator"):
            if name in kwargs:
                kwargs[name] = None
        noted_args, noted_kwargs = self._noted(args, kwargs, written)
        try:
            result = written[0] if _is_plain_normal(func, args) else func(*_on_meta(args), **_on_meta(kwargs))
        except NotImplementedError:  # no meta kernel: the shape depends on values
            if not written:
                return self._compute(func, args, kwargs)
            result = written[0]
        for tensor in written:
            self._recording.write(tensor, func, noted_args, noted_kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        for place, leaf in enumerate((result,) if isinstance(result, Tensor) else tree_leaves(result)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
                self._recording.write(leaf, func, noted_args, noted_kwargs, output=place)
        return result

    def _noted(self, args: Any, kwargs: Any, written: Sequence[Tensor]) -> tuple[Any, Any]:
        targets = {id(tensor) for tensor in written}

        def note(tensor: Tensor) -> Any:
            if id(tensor) in targets:
                return TARGET
            return self._recording.ref(tensor) if tensor.is_meta else tensor.detach().clone()

        return _changed(note, args), _changed(note, kwargs)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: self._value(tensor) if tensor.is_meta else tensor, (args, kwargs)
        )
        return func(*args, **kwargs)


class Reader(TorchFunctionMode):
    """Makes recorded tensors look real to a builder where no operator is involved.

    They convert to lists and arrays, and say that they are not on the meta device, since initialisers skip meta tensors.
    """

    def __init__(self, value: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._value = value

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func == _IS_META:
            return False
        if func in _READERS and args[0].is_meta:
            args = (self._value(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def noting_truncated_normal(recording: Recording) -> Iterator[None]:
    """Record torch.nn.init.trunc_normal_ as one write: it samples by rejection, and skips meta tensors."""
    original = torch.nn.init._no_grad_trunc_normal_

    def note(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        if tensor.device != META:
            return original(tensor, mean, std, a, b, generator=generator)
        recording.write(tensor, TRUNCATED_NORMAL, (TARGET, mean, std, a, b), {})
        return tensor

    torch.nn.init._no_grad_trunc_normal_ = note
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


@dataclass(frozen=True, slots=True)
class _Operator:
    """Facts from an operator's schema, cached because recording needs them at every call.

    Attributes:
        takes_device: whether it has a device argument.
        makes_tensors: whether it returns tensors.
        writes: index and name of the arguments that it writes in place.
    """

    func: Any
    takes_device: bool
    makes_tensors: bool
    writes: tuple[tuple[int, str], ...]

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the arguments that a call writes in place."""
        found = []
        for place, name in self.writes:
            value = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(value, (list, tuple)):
                raise MeshfoldError(
                    f"{self.func} writes a list of tensors at once, which a recorded initialisation cannot follow: "
                    "write them one by one, or build the model for real and pass that"
                )
            if isinstance(value, Tensor):
                found.append(value)
        return found


@functools.cache
def _operator(func: Any) -> _Operator:
    schema = func._schema
    return _Operator(
        func,
        takes_device=any(argument.name == "device" for argument in schema.arguments),
        makes_tensors=not schema.returns or any("Tensor" in str(made.type) for made in schema.returns),
        writes=tuple(
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
    )


def _is_plain_normal(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True for a plain normal_ on the meta device, which is a no-op but slow in torch."""
    return func is torch.ops.aten.normal_.default and args[0].is_floating_point() and (len(args) < 3 or args[2] >= 0)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among the arguments and in lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _changed(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Map a function over the tensors in arguments. Torch's ``tree_map_only`` takes longer than most operators here."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        changed = [_changed(change, each) for each in value]
        return changed if isinstance(value, list) else tuple(changed)
    if isinstance(value, dict):
        return {name: _changed(change, each) for name, each in value.items()}
    return value


def _on_meta(tree: Any) -> Any:
    return _changed(lambda tensor: tensor if tensor.is_meta else tensor.to(META), tree)
