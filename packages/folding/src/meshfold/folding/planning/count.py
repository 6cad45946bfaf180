"""Live tensors of a run on meta tensors: how many bytes are alive at the peak, and which tensors they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshfold.mesh.model_io import LiveBytes

BACKWARD = "a gradient in backward"


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor that is alive at the peak.

    Attributes:
        name: the module that made it, or what it is.
        shape: of the tensor that its memory was made for.
        bytes: of its memory.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"


class LiveTensors(LiveBytes):
    """Counts live storages, and remembers which ones are alive at the peak.

    Attributes:
        at_peak: these.
    """

    def __init__(self, model: nn.Module, *, round_bytes: int = 1, gloo: bool = False) -> None:
        """Args:
        model: whose modules give tensors their names.
        round_bytes: each storage counts in multiples of this; the CUDA allocator's is 512.
        gloo: collectives run on a CPU.
        """
        super().__init__(round_bytes=round_bytes)
        self._gloo = gloo
        self._copies: dict[int, int] = {}  # bytes of gloo's own copies, by the result that is waited for
        self.at_peak: tuple[LiveTensor, ...] = ()
        self._alive: dict[int, LiveTensor] = {}
        self._names = {module: name for name, module in model.named_modules()}
        self._running: list[str] = []
        self._noted = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> LiveTensors:
        self._hooks = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        hidden = _hidden_bytes(func, args)
        self._now += hidden  # alive with what the operator makes
        if self._gloo and func.namespace == "_c10d_functional":
            return self._collective(func, types, args, kwargs)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._now -= hidden

    def _collective(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        """Call a collective; gloo reduces a copy of what is scattered, which it keeps until the result is waited for."""
        copy = 0
        if func.overloadpacket is torch.ops._c10d_functional.reduce_scatter_tensor:
            copy = args[0].numel() * args[0].element_size()
        elif func.overloadpacket is torch.ops._c10d_functional.wait_tensor:
            self._now -= self._copies.pop(args[0].untyped_storage()._cdata, 0)
        self._now += copy
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if copy:
            self._copies[made.untyped_storage()._cdata] = copy
        return made

    def _see(self, tensor: Tensor, *, counts: bool) -> None:
        key = tensor.untyped_storage()._cdata
        before, peak = self._now, self._peak
        super()._see(tensor, counts=counts)
        if self._now > before:
            self._alive[key] = LiveTensor(self._name, tuple(tensor.shape), self._now - before)
        # A peak that is hardly higher is made of the same tensors.
        if self._peak > peak and self._peak > self._noted * 1.002:
            self._noted, self.at_peak = self._peak, tuple(self._alive.values())

    def _take_over(self, waited: Tensor, found: Tensor) -> None:
        super()._take_over(waited, found)
        alive = self._alive.pop(waited.untyped_storage()._cdata, None)
        if alive is not None:
            self._alive[found.untyped_storage()._cdata] = alive

    def _gone(self, key: int, size: int) -> None:
        self._alive.pop(key, None)
        super()._gone(key, size)

    @property
    def _name(self) -> str:
        if self._running:
            return self._running[-1]
        return BACKWARD if torch._C._current_graph_task_id() != -1 else "the stack"

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Context manager: gives the tensors that are made inside this name."""
        self._running.append(name)
        try:
            yield
        finally:
            self._running.pop()

    def _begin(self, module: nn.Module, *_: Any) -> None:
        name = self._names.get(module, "")
        parts = [part for part in name.split(".") if not part.isdigit() and part != "blocks"]
        self._running.append(".".join(parts) or type(module).__name__)

    def _end(self, *_: Any) -> None:
        self._running.pop()


def _hidden_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an operator holds while it runs, besides its arguments and results."""
    aten = torch.ops.aten
    if func.overloadpacket in (aten.native_layer_norm, aten.native_layer_norm_backward):
        return sum(
            x.numel() * x.element_size()
            for x in args[: 1 if func.overloadpacket is aten.native_layer_norm else 2]
            if isinstance(x, Tensor) and not x.is_contiguous()
        )
    return 0


def sum_by_name(tensors: tuple[LiveTensor, ...]) -> list[tuple[str, int, int]]:
    """Return (name, tensors, bytes) of tensors that were made in one place, the largest sum first."""
    found: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for tensor in tensors:
        found[tensor.name] += tensor.bytes
        counts[tensor.name] += 1
    return [(name, counts[name], total) for name, total in found.most_common()]
