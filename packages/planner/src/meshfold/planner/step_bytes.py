"""Bytes that are alive in a step without ``zero``, operator by operator on meta tensors, and their peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from meshfold.engine.states import GradientReducer
from meshfold.mesh.model_io import LiveBytes
from meshfold.planner.estimates import Memory

WORKSPACE_BYTES = 66 * 2**20
"""Memory that cuBLAS keeps while it is used: two workspaces of 32 MiB and a little (measured on an H200)."""


def workspace_bytes(kind: str) -> int:
    """Return the bytes of libraries' workspaces on a device of a kind."""
    return WORKSPACE_BYTES if kind == "gpu" else 0


def allocation_bytes(kind: str) -> int:
    """Return the bytes of which the allocator of a kind of device makes multiples."""
    return 512 if kind == "gpu" else 1


def fixed_bytes(model: nn.Module, kind: str) -> int:
    """Return the bytes that are always alive besides parameters and their state: buffers, and workspaces of libraries."""
    return sum(buffer.nbytes for buffer in model.buffers()) + workspace_bytes(kind)


class StepBytes(LiveBytes):
    """Counter of all bytes besides weights and optimizer state, as the device's allocator would count them.

    Gradients wait in buckets, which are made when the first gradient of a bucket arrives. Their bytes are counted separately.
    """

    def __init__(self, reducer: GradientReducer | None, *, kind: str = "gpu", base_bytes: int = 0) -> None:
        """Args:
        reducer: collects the gradients; None: they are dropped.
        kind: of the device.
        base_bytes: always alive in addition.
        """
        super().__init__(base_bytes=base_bytes, round_bytes=allocation_bytes(kind))
        self._reducer = reducer
        self._highest = base_bytes  # since the last look
        self._most, self._gradients, self._others = base_bytes, 0, base_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._look()  # a bucket that an operator has made is known by now
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _see(self, tensor: Tensor, *, counts: bool) -> None:
        super()._see(tensor, counts=counts)
        self._highest = max(self._highest, self._now)

    def _look(self) -> None:
        highest, self._highest = self._highest, self._now
        if highest <= min(self._most, self._others):
            return
        gradients = 0 if self._reducer is None else self._reducer.held_bytes
        self._others = max(self._others, highest - gradients)
        if highest > self._most:
            self._most, self._gradients = highest, gradients

    def take_others(self) -> tuple[int, int]:
        """Return the bytes that are not gradients: (most since the last call, now). The next maximum starts now."""
        self._look()
        most, now = self._others, self._now - (0 if self._reducer is None else self._reducer.held_bytes)
        self._others = now
        return most, now

    def with_state(self, state: Memory) -> Memory:
        """Return the memory at the peak, of a rank that has this state at the end of the last backward."""
        self._look()
        gradients = min(self._gradients, self._most)
        return replace(state, gradients=gradients, activations=self._most - gradients)
