"""The recorded initialisation of a model: which write went into which storage, in order, without computing a value.

Under :class:`Recorder` every factory makes a tensor on the meta device, and every write into such a tensor is noted in the list
that belongs to its storage. Views and tied parameters share a storage, and so its list. :mod:`meshfold.mesh.initialization.replay`
computes the values later, of those elements that a rank holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from meshfold.mesh.errors import MeshfoldError

META = torch.device("meta")
TRUNCATED_NORMAL = "trunc_normal_"
EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_OVERWRITE = {"fill_", "zero_", "copy_"}
_READERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes, strides and offset of a tensor in its storage, in elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.size).numel()

    def covers(self, nbytes: int) -> bool:
        """Return True if each byte of a storage of this size belongs to exactly one element."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.numel * self.dtype.itemsize == nbytes


@dataclass(frozen=True, slots=True)
class Ref:
    """A recorded tensor at one moment: its storage after a number of writes, seen through a geometry."""

    storage: int
    writes: int
    geometry: Geometry


class Target:
    """Placeholder, among the arguments of an in-place operation, for the tensor that it writes."""


TARGET = Target()


@dataclass(frozen=True, eq=False, slots=True)
class Write:
    """One write into a storage.

    Attributes:
        func: the operator, or `TRUNCATED_NORMAL`.
        args: its arguments: `Ref` for a recorded tensor, `TARGET` for the one written, a copy of a real tensor.
        kwargs: the same.
        target: the elements that are written.
        output: for an operator that makes its result, which of its results this is; None if it writes in place.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Geometry
    output: int | None

    @property
    def name(self) -> str:
        """The operator's name without overload: ``"normal_"``."""
        return self.func if isinstance(self.func, str) else str(self.func._schema.name).removeprefix("aten::")

    @property
    def random(self) -> bool:
        """True if the write draws random numbers."""
        return isinstance(self.func, str) or torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def overwrites(self) -> bool:
        """True if the new values do not depend on the old ones."""
        into_out = self.output is None and not self.name.endswith("_")
        return self.name not in EMPTY and (
            self.output is not None or self.name in _OVERWRITE or self.random or into_out
        )

    @property
    def refs(self) -> list[Ref]:
        """Traced tensors among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)]


@dataclass(slots=True)
class Log:
    """The writes into one storage. Holds the storage, so that its address stays its own."""

    storage: torch.UntypedStorage
    writes: list[Write] = field(default_factory=list)

    def live(self, count: int) -> list[Write]:
        """Return the writes that still count among the first ``count``: from the last one that replaced every element."""
        nbytes = self.storage.nbytes()
        for start in range(count - 1, 0, -1):
            if self.writes[start].overwrites and self.writes[start].target.covers(nbytes):
                return self.writes[start:count]
        return self.writes[:count]

    def defined(self, count: int) -> bool:
        """Return True if the first ``count`` writes have given every element a value."""
        live = self.live(count)
        if live and live[0].overwrites and live[0].output is not None:
            return True
        pieces = {write.target for write in live if write.overwrites}
        return sum(piece.numel * piece.dtype.itemsize for piece in pieces) >= self.storage.nbytes()


class Recording:
    """The lists of writes of all storages, by storage."""

    def __init__(self) -> None:
        self._logs: dict[int, Log] = {}

    def ref(self, tensor: Tensor) -> Ref:
        """Return the tensor with its present values."""
        storage = tensor.untyped_storage()
        return Ref(storage._cdata, len(self.log(storage).writes), Geometry.of(tensor))

    def knows(self, tensor: Tensor) -> bool:
        """Return True if the tensor was made, or written, under this recording."""
        return tensor.device == META and tensor.untyped_storage()._cdata in self._logs

    def log(self, storage: torch.UntypedStorage) -> Log:
        """Return the writes into a storage, which may be none yet."""
        return self._logs.setdefault(storage._cdata, Log(storage))

    def log_of(self, ref: Ref) -> Log:
        """Return the writes into the storage that a reference names."""
        return self._logs[ref.storage]

    def write(
        self,
        target: Tensor,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        output: int | None = None,
    ) -> None:
        """Record a write whose args and kwargs hold refs."""
        log = self.log(target.untyped_storage())
        log.writes.append(Write(func, tuple(args), kwargs, Geometry.of(target), output))


@dataclass(frozen=True, slots=True)
class Window:
    """Elements of a tensor that a write reaches: along each dim ``count`` indices from ``start`` in steps of ``step``.

    ``dims`` gives, for each dim of the written values, the dim of the tensor it runs along, None for one of size 1.
    """

    starts: tuple[int, ...]
    steps: tuple[int, ...]
    counts: tuple[int, ...]
    dims: tuple[int | None, ...]

    @classmethod
    def of(cls, written: Geometry, base: Geometry) -> Window | None:
        """Return the window of ``base`` that ``written`` is, if it is one."""
        if written.dtype != base.dtype or written.offset < base.offset:
            return None
        rest = written.offset - base.offset
        starts, steps, counts = [0] * len(base.size), [1] * len(base.size), [1] * len(base.size)
        order = sorted((d for d, size in enumerate(base.size) if size > 1), key=lambda d: -base.stride[d])
        for d in order:
            if base.stride[d] == 0:
                return None
            starts[d], rest = divmod(rest, base.stride[d])
        dims: list[int | None] = []
        for size, stride in zip(written.size, written.stride, strict=True):
            along = next((d for d in order if stride and stride % base.stride[d] == 0), None) if size > 1 else None
            if size > 1 and (along is None or along in dims):
                return None
            if along is not None:
                steps[along], counts[along] = stride // base.stride[along], size
            dims.append(along)
        inside = all(starts[d] + (counts[d] - 1) * steps[d] < base.size[d] for d in order)
        if rest or not inside:
            return None
        return cls(tuple(starts), tuple(steps), tuple(counts), tuple(dims))

    @classmethod
    def all(cls, base: Geometry) -> Window:
        """Return every element of a tensor."""
        n = len(base.size)
        return cls((0,) * n, (1,) * n, base.size, tuple(range(n)))

    def positions(self, dim: int, points: Tensor, size: int) -> slice | Tensor:
        """Return the window's positions along a dim of a block; padding belongs to a window of the whole dim."""
        if self.starts[dim] == 0 and self.steps[dim] == 1 and self.counts[dim] == size:
            return slice(None)
        distance = points - self.starts[dim]
        step = self.steps[dim]
        inside = (distance >= 0) & (distance % step == 0) & (distance < self.counts[dim] * step)
        return inside.nonzero().flatten()


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
