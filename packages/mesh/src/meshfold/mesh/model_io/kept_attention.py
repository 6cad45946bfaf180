"""Results of attention, kept from a forward for its repetition, which then does not compute attention again.

Attention is dear and its results are small: an output and a log-sum-exp of each row. Its backward needs them, and the inputs,
which a repetition computes again. A dispatch mode sees the operators of torch and of flash-attn, in compiled graphs as in eager
forwards. Attention of several operators, such as a ring's, calls :func:`kept_attention`.

Attention that drops weights, that needs all of them in its backward, or that is a higher-order operator runs again. So does
attention over far fewer keys than another one before it, as to the text in a U-Net: its results are as large, and it takes no time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

T = TypeVar("T")

ATTENTION_OF = "attention of "
"""With the name of a block after it, the name of the results of attention in that block."""

FEWER = 8
"""Attention over fewer than the most keys of this forward, divided by this number, is not kept."""
_OPERATORS = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::_flash_attn_forward",
    "meshfold::pair_attention",
}


class KeptAttention:
    """Results of attention in one forward.

    Results are copied: what a forward does with an output in place does not change them, nor do compiled graphs that write
    another tensor to its memory. A repetition takes them in order and frees each with its backward. A second one finds none, and
    computes them.
    """

    def __init__(self) -> None:
        self._results: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Context manager around the forward."""
        self._results.clear()
        with _Mode(self._keep):
            yield

    @contextmanager
    def returning(self) -> Iterator[None]:
        """Context manager around its repetition, which may end early."""
        try:
            with _Mode(self._return):
                yield
        finally:
            self._results.clear()

    def _keep(self, key: Any, compute: Callable[[], Any]) -> Any:
        found = compute()
        self._results.append((key, tree_map_only(Tensor, _copy, found)))
        return found

    def _return(self, key: Any, compute: Callable[[], Any]) -> Any:
        if self._results and self._results[0][0] == key:
            return self._results.popleft()[1]
        self._results.clear()  # another forward than the first one
        return compute()


def kept_attention(name: str, compute: Callable[[], T], *inputs: Any, keys: int | None = None) -> T:
    """Return the results of attention; in a repetition, those of the first time.

    Args:
        name: of this attention.
        compute: returns the results: tensors that do not require gradients, as in the forward of an autograd function. Its
            operators and collectives are left out of the repetition.
        inputs: with shapes and settings that tell calls apart.
        keys: of a sequence that queries may see; None: many.
    """
    mode: _Mode | None = getattr(_now, "mode", None)
    if mode is None or torch.compiler.is_compiling():
        return compute()
    found: T = mode.apart(_key(name, inputs), compute, keys)
    return found


@contextmanager
def attention_seen(see: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Context manager: pass each call of attention whose results could be kept to ``see``, which makes and returns it."""
    with _Mode(lambda key, compute: see(compute)):
        yield


_now = threading.local()


class _Mode(TorchDispatchMode):
    """Passes each call of attention to a function, with a key of its inputs."""

    supports_higher_order_operators = True

    def __init__(self, meet: Callable[[Any, Callable[[], Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meet, self._apart = meet, False
        self._outer: _Mode | None = None
        self._most = 0  # keys, so far

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: blocks are compiled without this mode, and their graphs run in it."""
        return True

    def __enter__(self) -> _Mode:
        self._outer = getattr(_now, "mode", None)
        _now.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _now.mode = self._outer

    def apart(self, key: Any, compute: Callable[[], Any], keys: int | None) -> Any:
        """Pass a call of several operators, of which none counts on its own."""
        if self._apart:
            return compute()
        if self._outer is not None:
            compute = partial(self._outer.apart, key, compute, keys)
        self._apart = True
        try:
            return compute() if self._takes_no_time(keys) else self._meet(key, compute)
        finally:
            self._apart = False

    def _takes_no_time(self, keys: int | None) -> bool:
        """Return True for attention over far fewer keys than before."""
        self._most = max(self._most, keys or 0)
        return keys is not None and FEWER * keys < self._most

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _dropout_places:
            _dropout_places[func] = _dropout_place(func)
        place = _dropout_places[func]
        if place is None or self._apart or _drops(place, args, kwargs):
            return func(*args, **kwargs)
        if func._schema.name.startswith("aten::_scaled_dot") and self._takes_no_time(args[1].shape[-2]):
            return func(*args, **kwargs)
        return self._meet(_key(func, (args, kwargs)), lambda: func(*args, **kwargs))


_dropout_places: dict[Any, tuple[int, str] | None] = {}
"""Position and name of the probability of dropout in an operator of attention; None for all others."""


def _dropout_place(func: Any) -> tuple[int, str] | None:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name not in _OPERATORS:
        return None
    names = [argument.name for argument in schema.arguments]
    return next(((place, name) for place, name in enumerate(names) if name == "dropout_p"), (len(names), "dropout_p"))


def _drops(place: tuple[int, str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    position, name = place
    return float(args[position] if position < len(args) else kwargs.get(name, 0.0)) > 0.0


def _key(name: Any, inputs: Any) -> Any:
    """Return what is equal in a forward and its repetition: an operator, with the shapes of tensors and other values."""
    leaves, _ = tree_flatten(inputs)
    return name, [(tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves]


def _copy(x: Tensor) -> Tensor:
    """Return a copy with the same strides, which compiled graphs expect."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
