"""What a way of stepping can do for the chunks it was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshfold.zero_gemini.chunk import Chunk


class Entry(NamedTuple):
    """One tensor of an optimizer: whether it has its parameter's shape (else it is a number), and its dtype's name."""

    like: bool
    dtype: str


class Stepper(Protocol):
    """Keeps the true weights and the optimizer's state of chunks, and steps.

    Attributes:
        optimizer: has the groups and their settings; its parameters are stretches of this rank's shards.
    """

    optimizer: torch.optim.Optimizer

    def adopt(self, chunk: Chunk, home: torch.device) -> None:
        """Take charge of a chunk; state and true weights live on ``home``."""

    def stretch(self, name: str) -> nn.Parameter | None:
        """This rank's elements of a parameter as a parameter of the optimizer; None if it has none."""

    def true_dtype(self, chunk: Chunk) -> torch.dtype:
        """Of the chunk's true weights."""

    def fill(self, name: str, block: Tensor) -> None:
        """Take a parameter's true values, of its shape."""

    def true(self, name: str) -> Tensor:
        """This rank's elements of a parameter's true values, flat."""

    def publish(self, chunk: Chunk) -> None:
        """Start showing the true weights to the model."""

    def step(self, gradients: Mapping[Chunk, Tensor], scale: float | Tensor, used: set[str]) -> None:
        """Step on every chunk.

        Args:
            gradients: each chunk's shard of the gradient, on the chunk's home.
            scale: what gradients count times.
            used: names of the parameters that have a gradient; the others are left as they are.
        """

    def finish(self) -> None:
        """Let every step be done that was only promised, and the model see it. All ranks must call."""

    def done_with(self, chunk: Chunk) -> None:
        """Return once the gradient that a chunk was stepped with is needed no more."""

    def reset(self) -> None:
        """Forget the optimizer's state, as if it had not stepped yet."""

    def close(self) -> None:
        """The end."""

    def entries(self, chunk: Chunk) -> dict[str, dict[str, Entry]]:
        """The optimizer's tensors of a chunk on this rank, by parameter and key."""

    def read(self, name: str, key: str) -> Tensor:
        """One of them: this rank's elements, flat, or a number."""

    def write(self, name: str, key: str, value: Tensor) -> None:
        """Take one of them."""
