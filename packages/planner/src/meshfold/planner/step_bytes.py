"""Bytes that are alive in a step without ``zero``, operator by operator on meta tensors, and the fullest moment."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from meshfold.engine.states import GradientReducer
from meshfold.mesh.model_io import LiveBytes
from meshfold.planner.estimates import Memory

WORKSPACE_BYTES = 66 * 2**20
"""Memory that cuBLAS keeps while it is used: two workspaces of 32 MiB and a little (measured on an H200)."""


def fixed_bytes(model: nn.Module) -> int:
    """Return the bytes that are always alive, beside parameters and their state: buffers, and workspaces of cuBLAS."""
    return sum(buffer.nbytes for buffer in model.buffers()) + WORKSPACE_BYTES


class StepBytes(LiveBytes):
    """Counts all that is alive in micro-steps beside weights and optimizer state, as the CUDA allocator would.

    Gradients wait in buckets, which are made when the first gradient of a bucket arrives, and whose bytes are counted apart.
    """

    def __init__(self, reducer: GradientReducer, *, base_bytes: int) -> None:
        """Args:
        reducer: has the gradients.
        base_bytes: always alive in addition.
        """
        super().__init__(base_bytes=base_bytes, round_bytes=512)
        self._reducer = reducer
        self._most = self._gradients = 0

    def _see(self, tensor: Tensor, *, counts: bool) -> None:
        super()._see(tensor, counts=counts)
        if self._now > self._most:
            self._most, self._gradients = self._now, self._reducer.held_bytes

    def with_state(self, state: Memory) -> Memory:
        """Return the memory at the fullest moment, of a rank that has this state at the end of the last backward."""
        gradients = min(self._gradients, self._most)
        return replace(state, gradients=gradients, activations=self._most - gradients)
