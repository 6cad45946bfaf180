"""Runs of a model's forward: on the meta device, counted; in eval mode; with the tensors of its output changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from meshfold.mesh.model_io.kept_attention import kept_attention
from meshfold.mesh.model_io.operators import OperatorCounter

C = TypeVar("C", bound=OperatorCounter)


class Saved:
    """Storages that are kept for backward, each counted once.

    Attributes:
        bytes: of them.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """Args:
        parameters: what does not count.
        """
        self.bytes = 0
        self._seen = {parameter.untyped_storage()._cdata for parameter in parameters}

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            weakref.finalize(storage, self._seen.discard, storage._cdata)  # another may get its address
            self.bytes += storage.nbytes()


@contextmanager
def saved_for_backward(parameters: Iterable[Tensor]) -> Iterator[Saved]:
    """Count the storages saved for backward: each once, without parameters and other given tensors."""
    found = Saved(parameters)

    def pack(tensor: Tensor) -> Tensor:
        found.add(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


class _Attention(torch.autograd.Function):
    """Attention on meta tensors that saves what flash attention saves: inputs, output, one number per row, mask."""

    @staticmethod
    def forward(
        ctx: Any,
        count: Callable[[int, int, float, int], None],
        causal: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """``b n s d, b n' t d, b n' t e -> b n s e``"""
        *lead, heads, rows, _ = (1,) * (4 - q.dim()) + tuple(q.shape)
        ctx.count, ctx.computed = count, 0.5 if causal else 1.0

        def attend() -> tuple[Tensor, Tensor]:
            count(_pairs(q, k) * (q.shape[-1] + v.shape[-1]), q.shape[-1], ctx.computed, k.shape[-2])
            # Heads contiguous per token, as the output projection expects them.
            out = q.new_empty((*lead, rows, heads, v.shape[-1])).transpose(-3, -2).view(*q.shape[:-1], v.shape[-1])
            return out, q.new_empty(q.shape[:-1], dtype=torch.float32)

        out, lse = kept_attention("attention", attend, q, k, v, causal, keys=k.shape[-2])
        ctx.save_for_backward(q, k, v, out, lse, mask)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the three inputs."""
        q, k, v, *_ = ctx.saved_tensors
        # Five matmuls, including recomputed scores.
        ctx.count(_pairs(q, k) * (3 * q.shape[-1] + 2 * v.shape[-1]), q.shape[-1], ctx.computed, k.shape[-2])
        return None, None, torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _pairs(q: Tensor, k: Tensor) -> int:
    """Return the FLOPs of a matmul over all pairs of rows, per element of the dim that it sums over or produces."""
    return 2 * q.shape[:-1].numel() * k.shape[-2]


class DryRun(TorchFunctionMode):
    """Lets a model's code run on the meta device.

    ``scaled_dot_product_attention`` would keep all scores there; the one above takes its place. Code that asks
    whether all elements are true (a mask that masks nothing) gets True, and whether any is, False.

    Attributes:
        active: the one that is entered, if any.
        counter: of the operators that run, given attention too; None: nothing is counted.
        on_gpu: operators are those of a GPU, whose softmax widens float16 to float32 by itself.
    """

    active: ClassVar[DryRun | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.counter: OperatorCounter | None = None
        self.on_gpu = False
        self._depth = 0
        self._handles: list[Any] = []

    def __enter__(self) -> DryRun:
        # Torch disables function modes in backward, where activation checkpointing calls modules again.
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        DryRun.active = self
        return self

    def __exit__(self, *error: Any) -> None:
        DryRun.active = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Context manager around a forward that a backward runs again: as inside of a module."""
        self._begin()
        try:
            with nullcontext() if self.counter is None else self.counter.repeating():
                yield
        finally:
            self._end()

    @contextmanager
    def counting(self, counter: C) -> Iterator[C]:
        """Context manager: counts the operators that run inside it, and attention."""
        before, self.counter = self.counter, counter
        try:
            with counter:
                yield counter
        finally:
            self.counter = before

    def _begin(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            super().__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: Any) -> None:
        if self._depth == 1:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._depth -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            named = dict(zip(names, args, strict=False)) | (kwargs or {})
            if named["query"].is_meta:  # trials of modules use real values
                causal = bool(named.get("is_causal"))
                return self._attention(causal, *(named.get(name) for name in names[:4]))
        if func in _SOFTMAX and self.on_gpu:
            softmax = _widening_softmax(*args, **(kwargs or {}))
            if softmax is not None:
                return softmax
        if func in (Tensor.__bool__, Tensor.item) and hasattr(args[0], "_holds"):
            return args[0]._holds
        if func is Tensor.__contains__ and args[0].is_meta:
            return False
        found = func(*args, **(kwargs or {}))
        if func in (torch.all, Tensor.all, torch.any, Tensor.any) and isinstance(found, Tensor) and found.is_meta:
            found._holds = func in (torch.all, Tensor.all)  # type: ignore[attr-defined]
        # transformers writes mask.all() as mask.sum() == mask.numel(), so remember the count until it is compared.
        if func is Tensor.sum and len(args) == 1 and args[0].is_meta and args[0].dtype is torch.bool:
            found._most = args[0].numel()
        if func is Tensor.__eq__ and isinstance(args[1], int) and getattr(args[0], "_most", None) == args[1]:
            found._holds = True
        return found

    def _attention(self, causal: bool, *given: Tensor | None) -> Tensor:
        found: Tensor = _Attention.apply(self.add_attention, causal, *given)
        return found

    def add_attention(self, flop: int, head_dim: int = 128, computed: float = 1.0, keys: int = 0) -> None:
        """Count attention, forward or backward; see :meth:`OperatorCounter.add_attention`."""
        if self.counter is not None:
            self.counter.add_attention(flop, head_dim, computed, keys)


_SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)


def _widening_softmax(
    input: Tensor, dim: int | None = None, *_: object, dtype: torch.dtype | None = None, **__: object
) -> Tensor | None:
    """Return a softmax in float32 of float16 as one operator, on the meta device; None for any other."""
    if not input.is_meta or dim is None or dtype is not torch.float32 or input.dtype is not torch.float16:
        return None
    return torch._softmax(input, dim, True)


def map_tensors(
    output: Any, change: Callable[[str, Tensor], Tensor], *, deep: bool = False, name: str = "output"
) -> Any:
    """Return a model's output with its tensors changed: a tensor, a tuple or list, a mapping or an object with attributes.

    Args:
        output: a mapping or an object is changed in place.
        change: makes the new tensor from a name such as ``output.logits`` or ``output[1]`` and the tensor.
        deep: those in tuples and lists inside too.
        name: of the output.
    """
    if isinstance(output, Tensor):
        return change(name, output)

    def inner(place: str, value: Any) -> Any:
        if isinstance(value, Tensor) or (deep and isinstance(value, tuple | list)):
            return map_tensors(value, change, deep=deep, name=place)
        return value

    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(
            *(inner(f"{name}.{field}", value) for field, value in zip(output._fields, output, strict=True))
        )
    if isinstance(output, tuple | list):
        return type(output)(inner(f"{name}[{place}]", value) for place, value in enumerate(output))
    if isinstance(output, Mapping):
        for key, value in output.items():
            if (made := inner(f"{name}.{key}", value)) is not value:
                output[key] = made  # type: ignore[index]
    else:
        for key, value in getattr(output, "__dict__", {}).items():
            if (made := inner(f"{name}.{key}", value)) is not value:
                object.__setattr__(output, key, made)  # also if the dataclass is frozen
    return output


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context manager: put the model in eval mode, then restore each module's mode."""
    training = {module: module.training for module in model.modules()}
    if any(training.values()):
        model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            if module.training != was:
                module.training = was
